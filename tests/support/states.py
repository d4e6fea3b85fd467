"""Random states and layouts, and their merge as torch's own softmax makes it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from anabranch import AttentionState


def random_state(
    shape: Sequence[int],
    seed: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    empty: float = 0.1,
    level: float = 0.0,
) -> AttentionState:
    """A state whose `out` has this shape, with a share of empty rows and LSEs around `level`."""
    rng = torch.Generator().manual_seed(seed)
    nothing = torch.rand(shape[:-1], generator=rng) < empty
    out = torch.randn(shape, generator=rng).masked_fill(nothing[..., None], 0)
    lse = (level + 4 * torch.randn(shape[:-1], generator=rng)).masked_fill(nothing, -torch.inf)
    wide = torch.promote_types(dtype, torch.float32)
    return AttentionState(out.to(device, dtype), lse.to(device, wide))


def stack(states: Sequence[AttentionState]) -> AttentionState:
    """One state whose dimension 0 holds the parts."""
    return AttentionState(*map(torch.stack, zip(*states, strict=True)))


def double(state: AttentionState) -> AttentionState:
    """The same state in float64 on the CPU."""
    return AttentionState(*(x.cpu().double() for x in state))


def torch_merge(parts: AttentionState, dtype: torch.dtype | None = None) -> AttentionState:
    """The merge over dimension 0 by torch.softmax, in float32 or wider, rounded to `dtype`."""
    out, lse = parts
    weights = torch.softmax(lse, 0).nan_to_num(0.0)
    merged = (weights[..., None] * out.to(lse.dtype)).sum(0)
    return AttentionState(merged.to(dtype or out.dtype), torch.logsumexp(lse, 0))


def laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values in other strides, NaN in the memory between them."""
    shape = list(tensor.shape)
    if layout == "contiguous":
        return tensor.clone()
    if layout == "transposed":  # [..., heads, tokens, dim] in memory
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "reversed":  # the last dimension outermost
        return tensor.movedim(-1, 0).contiguous().movedim(0, -1)
    if layout == "stride 2":
        view = tensor.new_full([*shape[:-1], 2 * shape[-1]], torch.nan)[..., ::2]
    else:
        assert layout == "sliced"
        view = tensor.new_full([size + 3 for size in shape], torch.nan)
        view = view[tuple(slice(1, 1 + size) for size in shape)]
    view.copy_(tensor)
    return view
