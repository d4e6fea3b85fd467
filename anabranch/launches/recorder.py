"""What repeated calls need: the kind of a call, new memory, and launches that are recorded.

All that a call must look up is known after the first of its kind; `prepare.py` makes launches of
what was recorded then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from anabranch.launches.compile_ahead import AHEAD
from anabranch.launches.extension import load_launches
from anabranch.launches.hopper_ptx import on_hopper, teach_compiler

Kind = TypeVar("Kind")
Known = TypeVar("Known")
MOST_KINDS = 8192  # a step of prompts has its own number of tokens, and so its own kinds
# How every kernel is compiled. Fused products and sums are set because the default changes between
# versions of Triton, and results with it.
COMPILED = {"enable_fp_fusion": True}
ALLOCATIONS = {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty"}
_core: Any = torch._C  # pyright: ignore[reportPrivateUsage]
_fast: Callable[..., torch.Tensor] | None = getattr(
    _core._dynamo.guards, "_empty_strided_cuda", None
)
_current_device: Callable[[], int] | None = getattr(_core, "_cuda_getDevice", None)
_is_deterministic: Callable[[], bool] = _core._get_deterministic_algorithms
_current = threading.local()


class Kinds(dict[Kind, Known]):
    """What is known of kinds, all of it forgotten when there are too many."""

    def keep(self, kind: Kind, known: Known) -> Known:
        """Remember what a kind of call needs."""
        if len(self) >= MOST_KINDS:
            self.clear()
        self[kind] = known
        return known


def describe(tensors: tuple[torch.Tensor | None, ...]) -> bytes | None:
    """Shapes, strides, dtypes, alignments and devices of tensors, and which of them are one.

    None under a tracer, without a C compiler, and while kernels are compiled ahead: then nothing
    is remembered of a call.
    """
    if torch.compiler.is_compiling() or AHEAD.get():
        return None
    launches = load_launches()
    return None if launches is None else launches.describe(tensors)


def are_apart(written: tuple[torch.Tensor, ...], read: tuple[torch.Tensor | None, ...]) -> bool:
    """Whether tensors that were described before share no memory; what interleaves shares it."""
    launches = load_launches()
    return launches is not None and launches.is_apart(tuple(written), read)


def allocate(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """New memory; deterministic algorithms want it filled, which the fast way leaves out."""
    given: Any = (shape, strides)
    if device.type != "cuda" or _fast is None or _current_device is None or _is_deterministic():
        return torch.empty_strided(*given, dtype=dtype, device=device)
    if _current_device() != device.index:
        return torch.empty_strided(*given, dtype=dtype, device=device)
    return _fast(*given, dtype)


def stream_of(device: torch.device) -> int | None:
    """The current stream; None while it is captured, when memory belongs to the graph."""
    if torch.cuda.is_current_stream_capturing():
        return None
    return _core._cuda_getCurrentRawStream(device.index)


class KernelStart(NamedTuple):
    """A launch as Triton took it."""

    kernel: Any  # a CompiledKernel
    grid: tuple[int, ...]
    values: dict[str, Any]  # arguments by name


class PointerField(NamedTuple):
    """A pointer among the fields of a struct."""

    place: int  # bytes from the begin of the struct
    tensor: torch.Tensor
    offset: int  # bytes from the begin of the tensor


class StructStart(NamedTuple):
    """A launch of a function of the driver that takes one struct, whose pointers are left out."""

    function: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    overlaps: int  # whether it starts while the kernel ahead ends
    content: bytes
    fields: tuple[PointerField, ...]


@dataclass(slots=True)
class Recording:
    """The launches of a call, and whether they are all that it did."""

    launched: list[KernelStart | StructStart] = field(
        default_factory=list[KernelStart | StructStart]
    )
    complete: bool = True


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *arguments: Any,
    hopper: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Start a kernel of Triton or Gluon, the one way in which this package does.

    While kernels are compiled ahead, it is compiled only. `hopper` are options for that GPU.
    """
    how = COMPILED
    if hopper and on_hopper():
        teach_compiler()
        how = COMPILED | hopper
    if AHEAD.get():
        kernel.warmup(*arguments, grid=grid, **how, **options)
        return
    compiled = kernel[grid](*arguments, **how, **options)
    if getattr(_current, "recording", None) is not None:
        values = dict(zip(kernel.arg_names, arguments, strict=False)) | options
        note(KernelStart(compiled, grid, values))


def note(start: KernelStart | StructStart) -> None:
    """Add a launch to the recording under way, if there is one."""
    recording: Recording | None = getattr(_current, "recording", None)
    if recording is not None:
        recording.launched.append(start)


class _Watch(TorchDispatchMode):
    """Notes operations of torch that would have to run again."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.recording = recording

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is recorded under a tracer, and the guard costs 10 us an operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not repeats_by_itself(func):
            self.recording.complete = False
        return func(*args, **(kwargs or {}))


@cache
def repeats_by_itself(operation: Any) -> bool:
    """Whether launches need an operation of torch no more once its result's memory is known."""
    return operation.is_view or operation._schema.name in ALLOCATIONS


@contextmanager
def record(device: torch.device) -> Generator[Recording]:
    """Record what is launched inside."""
    if device.type == "cpu":  # nothing is, and watching would import torch's tracer
        yield Recording(complete=False)
        return
    outer, recording = getattr(_current, "recording", None), Recording()
    _current.recording = recording
    try:
        with _Watch(recording):
            yield recording
    finally:
        _current.recording = outer
