"""merge(): checks, choice of implementation, and the torch operator; no device code."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, Literal, NamedTuple, cast, overload

import torch

from anabranch.check_states import check_destination, check_in_place
from anabranch.launches.prepare import StateLaunches, prepare_state
from anabranch.launches.recorder import Kinds, are_apart, describe, record
from anabranch.shapes import FLOATS, check_device, check_dtype
from anabranch.state import AttentionState

# (states, stacked, out, lse): writes the merge of `states`, or of dimension 0 of the only one if
# `stacked`. Tensors are [tokens, heads, head_dim] and [tokens, heads] after that dimension.
Launcher = Callable[
    [tuple[AttentionState, ...], bool, torch.Tensor, torch.Tensor | None],
    None,
]
IMPLEMENTATIONS = {
    "torch": "anabranch.kernels.cpu.merge",
    "triton": "anabranch.kernels.triton.merge",
    "cuda": "anabranch.kernels.cuda.merge",
}
ENVIRONMENT_VARIABLE = "ANABRANCH_MERGE"
MAX_SEPARATE = 8  # states one launch takes by pointer; more are stacked first


class KnownMerge(NamedTuple):
    """What is known of merges of a kind after the first of them was checked."""

    launches: StateLaunches
    read: tuple[int, ...]  # tensors of the states that a given `out` must lie apart from


MERGES = Kinds[tuple[Any, ...], KnownMerge | None]()  # None: run the long way


@overload
def merge(
    *states: AttentionState,
    dim: int | None = None,
    out: AttentionState | None = None,
    out_dtype: torch.dtype | None = None,
    with_lse: Literal[True] = True,
    impl: str | None = None,
) -> AttentionState: ...
@overload
def merge(
    *states: AttentionState,
    dim: int | None = None,
    out: AttentionState | None = None,
    out_dtype: torch.dtype | None = None,
    with_lse: Literal[False],
    impl: str | None = None,
) -> torch.Tensor: ...
def merge(
    *states: AttentionState,
    dim: int | None = None,
    out: AttentionState | None = None,
    out_dtype: torch.dtype | None = None,
    with_lse: bool = True,
    impl: str | None = None,
) -> AttentionState | torch.Tensor:
    """Merge states over disjoint key sets into the state over their union.

    merge(a, b, c)              separate states
    merge(parts, dim=0)         one state whose dimension 0 holds the parts
    merge(a, b, out=a)          into the buffers of the first state
    merge(a, b, with_lse=False) only the output tensor, no LSE written

    `out_dtype` may differ from that of the parts (float32 partials into a 16-bit output).
    `impl` is "torch", "triton" or "cuda"; without it the environment variable ANABRANCH_MERGE
    decides, then the device and what is available. Not differentiable.
    """
    kind, tensors = None, ()
    if not torch.compiler.is_compiling() and _are_on_gpu(states):
        tensors = tuple(x for state in states for x in state)
        described = describe((*tensors, *(out or ())))
        if described is not None:
            kind = (described, dim, out_dtype, with_lse, impl, torch.is_grad_enabled())
            known = MERGES.get(kind)
            if known is not None and (
                out is None or are_apart(out, tuple(tensors[i] for i in known.read))
            ):
                out = known.launches.run(tensors, out, ())
                return out if with_lse else out.out

    _check_types(states)
    stacked = dim is not None
    if stacked:
        states = (_parts_first(states, dim),)
    _check(states, stacked)
    first = states[0].out
    if out_dtype is not None and out_dtype not in FLOATS:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
        raise ValueError(f"out_dtype must be one of {names}, got {out_dtype}")
    if out is not None:
        if out_dtype not in (None, out.out.dtype):
            raise ValueError(f"out_dtype is {out_dtype}, but out.out is {out.out.dtype}")
        check_destination(out, first.shape[1:] if stacked else first.shape, FLOATS, first.device)
    if torch.compiler.is_compiling():
        return _merge_traced(states, stacked, out, out_dtype, with_lse, impl)
    if out is not None:
        check_in_place(states, stacked, out, with_lse)
    launch = load_launcher(impl, first.device)
    if out is None:
        shape = first.shape[1:] if stacked else first.shape
        merged = first.new_empty(shape, dtype=out_dtype)
        out = AttentionState(merged, states[0].lse.new_empty(shape[:-1]))
    if kind is None or kind in MERGES:
        _launch_any_rank(launch, states, stacked, out, with_lse)
    else:
        with record(first.device) as recording:
            _launch_any_rank(launch, states, stacked, out, with_lse)
        found = prepare_state(recording, tensors, out)
        # What is written in place now, is so in all merges of the kind.
        written = [x.data_ptr() for x in out]
        read = tuple(i for i, x in enumerate(tensors) if x.data_ptr() not in written)
        MERGES.keep(kind, None if found is None else KnownMerge(found, read))
    return out if with_lse else out.out


def _are_on_gpu(states: tuple[AttentionState, ...]) -> bool:
    """Whether these are states, the first of them on a GPU."""
    for state in states:
        if type(state) is not AttentionState:
            return False
    return bool(states) and states[0].out.is_cuda


def _check_types(states: tuple[object, ...]) -> None:
    for i, state in enumerate(states):
        if not isinstance(state, AttentionState):
            raise ValueError(f"states[{i}] must be an AttentionState, got {type(state).__name__}")


def _parts_first(states: tuple[AttentionState, ...], dim: int) -> AttentionState:
    if len(states) != 1:
        raise ValueError(f"merge with dim={dim} takes one stacked state, got {len(states)}")
    out, lse = states[0]
    if not 0 <= dim < lse.dim():
        raise ValueError(
            f"dim must lie in [0, {lse.dim()}) for an lse {tuple(lse.shape)}, got {dim}"
        )
    return states[0] if dim == 0 else AttentionState(out.movedim(dim, 0), lse.movedim(dim, 0))


def _check(states: tuple[AttentionState, ...], stacked: bool) -> None:
    if not states:
        raise ValueError("merge needs at least one state, got none")
    first = states[0].out
    shape, dtype, device = first.shape, first.dtype, first.device
    for i, (part, lse) in enumerate(states):
        if part.shape != shape:
            raise ValueError(
                f"states[{i}].out has shape {tuple(part.shape)}, states[0].out has {tuple(shape)}"
            )
        if lse.shape != shape[:-1]:
            raise ValueError(
                f"states[{i}].lse has shape {tuple(lse.shape)}, its out has {tuple(shape)}: "
                "lse must be out without the last dimension (a transposed view for another layout)"
            )
        if part.dtype is not dtype:
            raise ValueError(f"states[{i}].out is {part.dtype}, states[0].out is {dtype}")
        if lse.dtype is not torch.float32:
            raise ValueError(f"states[{i}].lse must be torch.float32, got {lse.dtype}")
        check_device(f"states[{i}].out", part, device)
        check_device(f"states[{i}].lse", lse, device)
        if (part.requires_grad or lse.requires_grad) and torch.is_grad_enabled():
            raise ValueError(f"states[{i}] requires grad; merge is for inference, detach it")
    check_dtype("states[0].out", first, FLOATS)
    if stacked and not shape[0]:
        raise ValueError(f"a stacked state needs at least one part, got shape {tuple(shape)}")


def _launch_any_rank(
    launch: Launcher,
    states: tuple[AttentionState, ...],
    stacked: bool,
    out: AttentionState,
    with_lse: bool,
) -> None:
    """Bring states to [tokens, heads, head_dim] and call the launcher."""
    if len(states) > MAX_SEPARATE:
        states = (AttentionState(*map(torch.stack, zip(*states, strict=True))),)
        stacked = True
    if not out.out.numel():
        if with_lse:  # head_dim 0 still has an LSE; the definition serves
            load_launcher("torch", out.out.device)(states, stacked, *out)
        return
    if out.out.dim() == 3:
        return launch(states, stacked, out.out, out.lse if with_lse else None)
    lead = 1 if stacked else 0
    states = tuple(_as_rows(state, lead) for state in states)
    rows = _as_rows(out, 0)
    launch(states, stacked, rows.out, rows.lse if with_lse else None)
    for mine, theirs in zip(out, rows, strict=True):
        if mine.data_ptr() != theirs.data_ptr():  # strides that no view could flatten
            mine.copy_(theirs.view(mine.shape))


def _as_rows(state: AttentionState, lead: int) -> AttentionState:
    """[*lead, ..., head_dim] as [*lead, rows, 1, head_dim], a view wherever strides allow."""
    out, lse = state
    head = out.shape[:lead]
    rows = out.shape[lead:-1].numel()
    return AttentionState(
        out.reshape(*head, rows, 1, out.shape[-1]),
        lse.reshape(*head, rows, 1),
    )


@cache
def load_launcher(impl: str | None, device: torch.device) -> Launcher:
    """The launcher of an implementation; without a name, the best one for the device."""
    return cast("Launcher", _choose(impl, device).load(device))


def _choose(impl: str | None, device: torch.device) -> ModuleType:
    origin = "impl"
    if impl is None:
        origin, impl = ENVIRONMENT_VARIABLE, os.environ.get(ENVIRONMENT_VARIABLE) or None
    if impl is None:
        return _choose_best(device)
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"{origin} must be one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")
    return import_module(IMPLEMENTATIONS[impl])


def _choose_best(device: torch.device) -> ModuleType:
    if device.type == "cpu":
        return _choose("torch", device)
    cuda = _choose("cuda", device)
    try:
        cuda.load(device)
    except RuntimeError:  # no compiler here: portable code instead
        return _choose("triton", device)
    return cuda


def _merge_traced(
    states: tuple[AttentionState, ...],
    stacked: bool,
    out: AttentionState | None,
    out_dtype: torch.dtype | None,
    with_lse: bool,
    impl: str | None,
) -> AttentionState | torch.Tensor:
    outs, lses = [state.out for state in states], [state.lse for state in states]
    dtype = out_dtype or (outs[0].dtype if out is None else out.out.dtype)
    merged = AttentionState(*torch.ops.anabranch.merge(outs, lses, stacked, dtype, impl))
    if out is None:
        return merged if with_lse else merged.out
    out.out.copy_(merged.out)
    if with_lse:
        out.lse.copy_(merged.lse)
    return out if with_lse else out.out


@torch.library.custom_op("anabranch::merge", mutates_args=())
def _merge_op(
    outs: list[torch.Tensor],
    lses: list[torch.Tensor],
    stacked: bool,
    out_dtype: torch.dtype,
    impl: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    states = tuple(map(AttentionState, outs, lses))
    return merge(*states, dim=0 if stacked else None, out_dtype=out_dtype, impl=impl)


@_merge_op.register_fake  # pyright: ignore[reportUnknownMemberType]
def _(
    outs: list[torch.Tensor],
    lses: list[torch.Tensor],
    stacked: bool,
    out_dtype: torch.dtype,
    impl: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = outs[0].shape[1:] if stacked else outs[0].shape
    return outs[0].new_empty(shape, dtype=out_dtype), lses[0].new_empty(shape[:-1])
