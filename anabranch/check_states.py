"""Checks of states that a caller gives, to be read or to be written into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from anabranch.shapes import check_device, check_dtype
from anabranch.state import AttentionState


def check_state(
    name: str,
    state: AttentionState,
    shape: Sequence[int],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> None:
    """Refuse a state whose output has another shape, dtype or device."""
    shape = tuple(shape)
    if tuple(state.out.shape) != shape or tuple(state.lse.shape) != shape[:-1]:
        raise ValueError(
            f"{name} has shapes {tuple(state.out.shape)} and {tuple(state.lse.shape)}, "
            f"expected {shape} and {shape[:-1]}"
        )
    check_dtype(f"{name}.out", state.out, dtypes)
    check_dtype(f"{name}.lse", state.lse, (torch.float32,))
    check_device(f"{name}.out", state.out, device)
    check_device(f"{name}.lse", state.lse, device)


def check_destination(
    out: AttentionState,
    shape: Sequence[int],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> None:
    """Refuse a state that cannot hold an output of this shape."""
    shape = tuple(shape)
    check_state("out", out, shape, dtypes, device)
    for name, tensor in (("out.out", out.out), ("out.lse", out.lse)):
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            if stride == 0 and size > 1:
                raise ValueError(
                    f"{name} overlaps itself: shape {shape[: tensor.dim()]}, "
                    f"strides {tensor.stride()}"
                )
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires grad; detach it to write into it")


def check_unshared(out: AttentionState, read: Mapping[str, torch.Tensor]) -> None:
    """Refuse to write memory that is still to be read."""
    for other, theirs in read.items():
        for name, mine in (("out.out", out.out), ("out.lse", out.lse)):
            if _overlap(mine, theirs):
                raise ValueError(f"{name} overlaps {other}, which is still to be read")


def check_in_place(
    states: tuple[AttentionState, ...], stacked: bool, out: AttentionState, with_lse: bool
) -> None:
    """Refuse to write what is still to be read; memory that merely interleaves counts as shared."""
    first = AttentionState(*(x[0] for x in states[0])) if stacked else states[0]
    written = out if with_lse else (out.out,)
    for name, mine in zip(("out.out", "out.lse"), written, strict=False):
        for i, state in enumerate(states):
            for field, theirs in zip(("out", "lse"), state, strict=True):
                target = getattr(first, field)
                in_place = (
                    i == 0
                    and mine.data_ptr() == target.data_ptr()
                    and mine.stride() == target.stride()
                    and mine.dtype == target.dtype
                )
                if _overlap(mine, theirs) and not in_place:
                    raise ValueError(
                        f"{name} overlaps states[{i}].{field}; only the buffers of the first state "
                        "can be written in place, with the same strides"
                    )


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors may share memory; memory that merely interleaves counts as shared."""
    (a_start, a_stop), (b_start, b_stop) = _span(a), _span(b)
    return a_start < b_stop and b_start < a_stop


def _span(x: torch.Tensor) -> tuple[int, int]:
    """The first byte and the one after the last; nothing overlaps the span of no elements."""
    if not x.numel():
        return 0, 0
    steps = zip(x.shape, x.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return x.data_ptr(), x.data_ptr() + x.itemsize * (1 + last)
