"""Recorded launches made ready to be run again, with other pointers.

A recording holds if the call did nothing on the device but launch kernels through `launch`, and if
every pointer it passed leads into one of the tensors that the next call of the kind brings.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple, cast

import torch

from anabranch.launches import driver
from anabranch.launches.extension import connect_launches
from anabranch.launches.recorder import KernelStart, Recording, StructStart, allocate, note
from anabranch.state import AttentionState

Tensors = tuple[torch.Tensor | None, ...]
VALUE, POINTER, MAP, STRUCT, FIELD = range(5)  # kinds of parameters, as in launches.c
SIZES = {"i1": 1, "u1": 1, "i8": 1, "u8": 1, "i16": 2, "u16": 2, "i32": 4, "u32": 4, "fp32": 4}
MAP_BYTES, POINTER_BYTES = 128, 8
MAP_TYPES = {torch.uint8: 0, torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}  # CUtensorMap


class Parameter(NamedTuple):
    """What a kernel's parameter is in the next call of the kind, and its size in bytes."""

    kind: int
    tensor: int  # of the call, whose address is added to the value
    value: int
    place: int  # of a field in its struct
    content: bytes  # of a map or a struct
    size: int


class PreparedLaunches(NamedTuple):
    """Launches to be run again, and what must live as long."""

    run: Callable[[Any, Tensors], None]
    launches: Any
    kernels: tuple[Any, ...]


class StateLaunches(NamedTuple):
    """Launches that make a state: a new one, unless one is given."""

    prepared: PreparedLaunches
    shape: tuple[int, ...]  # of a new state's `out`
    strides: tuple[int, ...]
    lse_strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def run(self, before: Tensors, out: AttentionState | None, after: Tensors) -> AttentionState:
        """The state, which stands between the other tensors of the call."""
        (run, launches, _), shape, strides, lse_strides, dtype, device = self
        if out is None:
            out = AttentionState(
                allocate(shape, strides, dtype, device),
                allocate(shape[:-1], lse_strides, torch.float32, device),
            )
        run(launches, (*before, *out, *after))
        return out


class NotRecordable(Exception):
    """Why launches cannot be run again."""


class Leaf(NamedTuple):
    """An argument of a kernel that is no constant: its name, and its place if that is a tuple."""

    name: str
    path: tuple[int, ...]
    kind: str  # as Triton's compiler names types
    layout: dict[str, Any] | None  # of the boxes of a tensor map


class Places:
    """Where pointers lead among the tensors of a call."""

    def __init__(self, groups: tuple[Tensors, ...]) -> None:
        self.exact = defaultdict[int, list[tuple[int, int]]](list)
        self.around = defaultdict[int, list[tuple[int, int]]](list)
        self.ends = dict[int, int]()
        given = ((g, x) for g, group in enumerate(groups) for x in group)
        for i, (group, x) in enumerate(given):
            if x is not None:
                address = x.data_ptr()
                self.exact[address].append((i, group))
                self.around[x.untyped_storage().data_ptr()].append((i, address))
                self.ends[i] = _end(x, x.shape, x.stride())

    def find(self, tensor: torch.Tensor) -> tuple[int, int]:
        """The tensor of the call into which a pointer leads, and how many bytes after its begin."""
        address = tensor.data_ptr()
        if exact := self.exact.get(address):
            if len({group for _, group in exact}) == 1:
                return exact[0][0], 0
            raise NotRecordable("memory of several tensors of the call")
        around = self.around.get(tensor.untyped_storage().data_ptr(), [])
        if len(around) != 1:
            raise NotRecordable("memory that is not the call's, or of several tensors of it")
        ((place, begin),) = around
        return place, (address - begin) & (1 << 64) - 1

    def find_mapped(self, box: Any) -> tuple[int, int]:
        """The same for a tensor map, whose sizes hold for tensors that were described whole."""
        found = self.find(box.base)
        if _end(box.base, box.shape, box.strides) > self.ends[found[0]]:
            raise NotRecordable("a map of more than was described")
        return found


def _end(x: torch.Tensor, shape: Sequence[int], strides: Sequence[int]) -> int:
    """The byte after the last of these elements, the first of which is that of a tensor."""
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return x.data_ptr() + x.element_size() * (1 + last)


def prepare_state(
    recording: Recording, before: Tensors, state: AttentionState, *after: Tensors
) -> StateLaunches | None:
    """The launches that made a state, as `prepare` has them."""
    found = prepare(recording, (*before, *state), *after)
    if found is None:
        return None
    out, lse = state
    layout = (tuple(out.shape), out.stride(), lse.stride())
    return StateLaunches(found, *layout, out.dtype, out.device)


def prepare(recording: Recording, *groups: Tensors) -> PreparedLaunches | None:
    """The recorded launches for the tensors of other calls, or None if they cannot be run again.

    Tensors of a group are described together, so that those which are one tensor stay one.
    """
    launches, device = connect_launches(), next(iter(groups[0])).device  # pyright: ignore
    if launches is None or not recording.complete or not recording.launched:
        return None
    places = Places(groups)
    try:
        made = tuple(_prepare(launched, places) for launched in recording.launched)
    except NotRecordable:
        return None
    index, count = device.index or 0, sum(map(len, groups))
    kernels = tuple(getattr(launched, "kernel", None) for launched in recording.launched)
    ready = launches.prepare(driver.primary_context(index), index, count, made)
    return PreparedLaunches(launches.run, ready, kernels)


def _prepare(launched: KernelStart | StructStart, places: Places) -> tuple[Any, ...]:
    if isinstance(launched, StructStart):
        return _prepare_struct(launched, places.find)
    kernel, metadata = launched.kernel, launched.kernel.metadata
    if metadata.num_ctas != 1 or metadata.global_scratch_size or metadata.profile_scratch_size:
        raise NotRecordable("clusters and scratch memory")
    parameters = [
        parameter
        for leaf in leaves_of(kernel)
        for parameter in _parameters(leaf, launched.values[leaf.name], places)
    ]
    parameters += [Parameter(VALUE, 0, 0, 0, b"", POINTER_BYTES)] * 2  # scratch memory, of none
    if [each.size for each in parameters] != driver.parameter_sizes(kernel.function):
        raise NotRecordable("other parameters than expected")
    grid = (*launched.grid, 1, 1)[:3]
    block, overlaps = (32 * metadata.num_warps, 1, 1), int(bool(metadata.launch_pdl))
    given = tuple(each[:5] for each in parameters)
    return kernel.function, grid, block, metadata.shared, overlaps, given


@cache
def leaves_of(kernel: Any) -> tuple[Leaf, ...]:
    """The arguments of a compiled kernel, those in tuples one by one."""
    maps = iter(getattr(kernel.metadata, "tensordesc_meta", None) or ())
    return tuple(
        Leaf(name, path, leaf, next(maps, None) if leaf.startswith("tensordesc") else None)
        for name, kind in kernel.src.signature.items()
        for path, leaf in _flatten(kind)
    )


def _flatten(kind: Any, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], str]]:
    """What is no constant in a type, and its place in tuples."""
    if isinstance(kind, tuple):
        for place, inner in enumerate(cast("tuple[Any, ...]", kind)):
            yield from _flatten(inner, (*path, place))
    elif kind != "constexpr":
        yield path, kind


def launch_struct(start: StructStart, device: torch.device) -> None:
    """Start a kernel that takes one struct, and record it."""
    launches, index = connect_launches(), device.index or 0
    assert launches is not None
    tensors = tuple(field.tensor for field in start.fields)
    places = {id(tensor): (i, 0) for i, tensor in enumerate(tensors)}
    ready = (_prepare_struct(start, lambda tensor: places[id(tensor)]),)
    made = launches.prepare(driver.primary_context(index), index, len(tensors), ready)
    launches.run(made, tensors)
    note(start)


def _prepare_struct(
    start: StructStart, place_of: Callable[[torch.Tensor], tuple[int, int]]
) -> tuple[Any, ...]:
    parameters = [(STRUCT, 0, 0, 0, start.content)]
    for field in start.fields:
        tensor, offset = place_of(field.tensor)
        parameters.append((FIELD, tensor, offset + field.offset, field.place, b""))
    return start.function, start.grid, start.block, 0, start.overlaps, tuple(parameters)


def _parameters(leaf: Leaf, value: Any, places: Places) -> Iterator[Parameter]:
    """The parameters of an argument."""
    for place in leaf.path:
        value = value[place]
    kind = leaf.kind
    if kind.startswith("*"):
        yield Parameter(POINTER, *places.find(value), 0, b"", POINTER_BYTES)
    elif leaf.layout is not None or kind.startswith("tensordesc"):
        yield from _map_parameters(value, leaf.layout, places)
    else:
        yield Parameter(VALUE, 0, _bits(kind, value), 0, b"", SIZES.get(kind, 8))


def _bits(kind: str, value: Any) -> int:
    if kind in ("fp32", "fp64"):
        return int.from_bytes(struct.pack("<f" if kind == "fp32" else "<d", value), "little")
    if kind[0] not in "iu":
        raise NotRecordable(f"a number of type {kind}")
    return int(value) & (1 << 64) - 1


def _map_parameters(box: Any, layout: dict[str, Any] | None, places: Places) -> Iterator[Parameter]:
    """A tensor map, then the shape and strides of what it maps."""
    base, shape, strides = box.base, box.shape, box.strides
    if layout is None or layout["fp4_padded"] or base.dtype not in MAP_TYPES:
        raise NotRecordable("a descriptor without a tensor map")
    found, launches = places.find_mapped(box), connect_launches()
    assert launches is not None
    encoded = launches.encode(
        base.data_ptr(),
        MAP_TYPES[base.dtype],
        layout["swizzle"],
        int(box.padding == "nan"),
        tuple(layout["block_size"][::-1]),
        tuple(shape[::-1]),
        tuple(stride * base.element_size() for stride in strides[-2::-1]),
    )
    yield Parameter(MAP, *found, 0, encoded, MAP_BYTES)
    for size in shape:
        yield Parameter(VALUE, 0, size, 0, b"", 4)
    for stride in strides:
        yield Parameter(VALUE, 0, stride, 0, b"", 8)
