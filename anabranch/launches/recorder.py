"""The kernels that a call launches, recorded once and launched again with other pointers.

A recording holds if the call did nothing on the device but launch kernels through `launch`, and if
every pointer it passed leads into one of the tensors that the next call of the kind brings.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from anabranch.launches import driver
from anabranch.launches.compile_ahead import AHEAD
from anabranch.launches.extension import connect_launches

Tensors = tuple[torch.Tensor | None, ...]
VALUE, POINTER, MAP = range(3)  # kinds of parameters, as in launches.c
SIZES = {"i1": 1, "u1": 1, "i8": 1, "u8": 1, "i16": 2, "u16": 2, "i32": 4, "u32": 4, "fp32": 4}
MAP_BYTES, POINTER_BYTES = 128, 8
MAP_TYPES = {torch.uint8: 0, torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}  # CUtensorMap
# How every kernel is compiled. Fused products and sums are set because the default changes between
# versions of Triton, and results with it.
COMPILED = {"enable_fp_fusion": True}
ALLOCATIONS = {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty"}


class KernelStart(NamedTuple):
    """A launch as Triton took it."""

    kernel: Any  # a CompiledKernel
    grid: tuple[int, ...]
    values: dict[str, Any]  # arguments by name


class Parameter(NamedTuple):
    """What a kernel's parameter is in the next call of the kind, and its size in bytes."""

    kind: int
    tensor: int  # of the call, whose address is added to the value
    value: int
    map: bytes
    size: int


class PreparedLaunches(NamedTuple):
    """Launches to be run again, and what must live as long."""

    run: Callable[[Any, Tensors], None]
    launches: Any
    kernels: tuple[Any, ...]


@dataclass(slots=True)
class Recording:
    """The launches of a call, and whether they are all that it did."""

    launched: list[KernelStart] = field(default_factory=list[KernelStart])
    complete: bool = True


class NotRecordable(Exception):
    """Why launches cannot be run again."""


_current = threading.local()


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Start a kernel of Triton or Gluon, the one way in which this package does.

    While kernels are compiled ahead, it is compiled only.
    """
    if AHEAD.get():
        kernel.warmup(*arguments, grid=grid, **COMPILED, **options)
        return
    compiled = kernel[grid](*arguments, **COMPILED, **options)
    recording: Recording | None = getattr(_current, "recording", None)
    if recording is not None:
        values = dict(zip(kernel.arg_names, arguments, strict=False)) | options
        recording.launched.append(KernelStart(compiled, grid, values))


class _Watch(TorchDispatchMode):
    """Notes operations of torch that would have to run again."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func._schema.name not in ALLOCATIONS:
            self.recording.complete = False
        return func(*args, **(kwargs or {}))


@contextmanager
def record() -> Generator[Recording]:
    """Record what is launched inside."""
    outer, recording = getattr(_current, "recording", None), Recording()
    _current.recording = recording
    try:
        with _Watch(recording):
            yield recording
    finally:
        _current.recording = outer


def prepare(recording: Recording, *groups: Tensors) -> PreparedLaunches | None:
    """The recorded launches for the tensors of other calls, or None if they cannot be run again.

    Tensors of a group are described together, so that those which are one tensor stay one.
    """
    launches, device = connect_launches(), next(iter(groups[0])).device  # pyright: ignore
    if launches is None or not recording.complete or not recording.launched:
        return None
    try:
        made = tuple(_prepare(launched, groups) for launched in recording.launched)
    except NotRecordable:
        return None
    context, count = driver.primary_context(device.index), sum(map(len, groups))
    kernels = tuple(launched.kernel for launched in recording.launched)
    return PreparedLaunches(
        launches.run, launches.prepare(context, device.index, count, made), kernels
    )


def _prepare(launched: KernelStart, groups: tuple[Tensors, ...]) -> tuple[Any, ...]:
    kernel, metadata = launched.kernel, launched.kernel.metadata
    if metadata.num_ctas != 1 or metadata.global_scratch_size or metadata.profile_scratch_size:
        raise NotRecordable("clusters and scratch memory")
    maps = iter(getattr(metadata, "tensordesc_meta", None) or ())
    parameters = [
        parameter
        for name, kind in kernel.src.signature.items()
        for parameter in _flatten(kind, launched.values.get(name), maps, groups)
    ]
    parameters += [Parameter(VALUE, 0, 0, b"", POINTER_BYTES)] * 2  # scratch memory, of none
    if [each.size for each in parameters] != driver.parameter_sizes(kernel.function):
        raise NotRecordable("other parameters than expected")
    grid = (*launched.grid, 1, 1)[:3]
    threads, overlaps = 32 * metadata.num_warps, bool(metadata.launch_pdl)
    return (
        kernel.function,
        grid,
        threads,
        metadata.shared,
        int(overlaps),
        tuple(each[:4] for each in parameters),
    )


def _flatten(
    kind: Any, value: Any, maps: Iterator[dict[str, Any]], groups: tuple[Tensors, ...]
) -> Iterator[Parameter]:
    """The parameters of an argument, as the type says that Triton's compiler gives it."""
    if isinstance(kind, tuple):
        inner: Any
        for inner, each in zip(cast("tuple[Any, ...]", kind), value, strict=True):
            yield from _flatten(inner, each, maps, groups)
    elif kind.startswith("tensordesc"):
        yield from _flatten_map(value, next(maps, None), groups)
    elif kind.startswith("*"):
        yield Parameter(POINTER, *_place(value, groups), b"", POINTER_BYTES)
    elif kind != "constexpr":
        yield Parameter(VALUE, 0, _bits(kind, value), b"", SIZES.get(kind, 8))


def _bits(kind: str, value: Any) -> int:
    if kind in ("fp32", "fp64"):
        return int.from_bytes(struct.pack("<f" if kind == "fp32" else "<d", value), "little")
    if kind[0] not in "iu":
        raise NotRecordable(f"a number of type {kind}")
    return int(value) & (1 << 64) - 1


def _flatten_map(
    box: Any, layout: dict[str, Any] | None, groups: tuple[Tensors, ...]
) -> Iterator[Parameter]:
    """A tensor map, then the shape and strides of what it maps."""
    base, shape, strides = box.base, box.shape, box.strides
    if layout is None or layout["fp4_padded"] or base.dtype not in MAP_TYPES:
        raise NotRecordable("a descriptor without a tensor map")
    launches = connect_launches()
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
    yield Parameter(MAP, *_place(base, groups), encoded, MAP_BYTES)
    for size in shape:
        yield Parameter(VALUE, 0, size, b"", 4)
    for stride in strides:
        yield Parameter(VALUE, 0, stride, b"", 8)


def _place(tensor: torch.Tensor, groups: tuple[Tensors, ...]) -> tuple[int, int]:
    """The tensor of the call into which a pointer leads, and how many bytes after its begin."""
    address = tensor.data_ptr()
    given = [(g, x) for g, group in enumerate(groups) for x in group]
    exact = [i for i, (_, x) in enumerate(given) if x is not None and x.data_ptr() == address]
    if exact and len({given[i][0] for i in exact}) == 1:
        return exact[0], 0
    memory = tensor.untyped_storage().data_ptr()
    around = [
        (i, x.data_ptr())
        for i, (_, x) in enumerate(given)
        if x is not None and x.untyped_storage().data_ptr() == memory
    ]
    if exact or len(around) != 1:
        raise NotRecordable("memory that is not the call's, or of several tensors of it")
    place, begin = around[0]
    return place, (address - begin) & (1 << 64) - 1
