"""FlashInfer: LSE in base 2 on most paths, tokens before heads.

`state_t` (include/flashinfer/attention/state.cuh) keeps base 2; MLA has `return_lse_base_on_e`.
Up to 0.6.18 infinity was 5e4 (include/flashinfer/math.cuh): a row without keys has -5e4, or a
little more where n masked keys were summed, -5e4 + log2(n); since then it has -inf.
"""

from __future__ import annotations

import math

import torch

from anabranch.integrations.empty_rows import clear_rows
from anabranch.state import AttentionState

OLD_INFINITY = 5e4
LOG2_OF_MOST_KEYS = 32


def from_flashinfer(out: torch.Tensor, lse: torch.Tensor, *, log2: bool = True) -> AttentionState:
    """The state of `out` [..., heads, dim] and `lse` [..., heads], which is base 2 if `log2`."""
    if lse.shape != out.shape[:-1]:
        raise ValueError(
            f"lse has shape {tuple(lse.shape)}, expected out without its last dimension, "
            f"{tuple(out.shape[:-1])}"
        )
    if not log2:
        return clear_rows(out, lse, lse.isinf())
    above = lse + OLD_INFINITY
    empty = lse.isinf() | ((above >= 0) & (above <= LOG2_OF_MOST_KEYS))
    return clear_rows(out, lse * math.log(2), empty)


def to_flashinfer(state: AttentionState, *, log2: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse), contiguous as FlashInfer's kernels want them.

    Rows without keys have -5e4: of two with -inf, merges up to 0.6.18 make NaN.
    """
    lse = state.lse * math.log2(math.e) if log2 else state.lse
    lse = lse.masked_fill(state.lse == -torch.inf, -OLD_INFINITY)
    return state.out.contiguous(), lse.contiguous()
