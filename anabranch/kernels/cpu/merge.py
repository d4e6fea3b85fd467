"""The merge in torch operations: the CPU's implementation, and the definition on any device."""

from __future__ import annotations

import torch

from anabranch.state import AttentionState, merge_stacked


def load(device: torch.device) -> object:
    """Torch operations run on every device."""
    del device
    return merge


def merge(
    states: tuple[AttentionState, ...],
    stacked: bool,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Write the merge of `states`, or of dimension 0 of the only one, into `out` and `lse`."""
    parts = states[0] if stacked else AttentionState(*map(torch.stack, zip(*states, strict=True)))
    merged = merge_stacked(parts)
    out.copy_(merged.out)
    if lse is not None:
        lse.copy_(merged.lse)
