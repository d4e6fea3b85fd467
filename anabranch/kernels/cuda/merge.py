"""The merge in CUDA C++: kernels in merge.cu, compiled on first use, and how a merge is cut."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from anabranch.kernels.cuda.compilers import build_cubin
from anabranch.launches import driver
from anabranch.launches.extension import connect_launches
from anabranch.launches.prepare import launch_struct
from anabranch.launches.recorder import PointerField, StructStart
from anabranch.state import AttentionState

SOURCES = Path(__file__).parent
DTYPES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}
VARIANTS = (
    "pair1_vector",
    "pair2_vector",
    "pair1_scalar",
    "flat_vector",
    "parts_vector",
    "parts_scalar",
)
KERNELS = tuple(
    f"{variant}_{source}_{merged}"
    for variant in VARIANTS
    for source in DTYPES.values()
    for merged in DTYPES.values()
)
HEAD, STATE = struct.Struct("<6I"), struct.Struct("<2Q7q")  # of merge.cu's Arguments
LARGEST = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Layout:
    """How merges are cut into blocks; a merge has one thread for each 16 bytes of a source."""

    one_row_block: int  # threads of a block that merges two states, one row to a thread
    two_rows_block: int  # the same with two rows to a thread,
    two_rows_threads: int  # from a merge of this many threads on,
    large_block: int  # and in the largest,
    large_threads: int  # which begin here
    flat_block: int  # threads of a block that merges two states with equally spaced rows,
    flat_threads: int  # in merges of fewer threads than these
    parts_block: int  # threads of a block that merges any number of parts;
    parts_threads: int  # below this many threads, groups of the block share the parts
    programmatic: bool  # start while the kernel ahead ends


def select_layout(capability: tuple[int, int], num_sms: int) -> Layout:
    """The layout for a GPU of this compute capability and number of multiprocessors."""
    # Microseconds in a CUDA graph on an H200 (benchmarks/results/launch_cost/h200.json), float16,
    # head dim 128, FlashInfer in brackets: 256 x 16 one row of 128 2.17 (2.26); two rows of 256:
    # 613 x 48 7.02 (6.92), 4096 x 32 25.06 (25.10), 16384 x 32 94.64 and of 512 94.25 (94.57).
    # Not overlapping the launch ahead costs 0.3 to 0.7 more, streaming past the caches up to 14%.
    # Flat rows, another run: 1024 x 32 x 128 in the cache 3.80, two rows 4.67 (3.97), 512 x 64 x 64
    # 2.40 and 2.81 (2.45), 333 x 40 x 128 2.33 and 2.68 (2.14); not in the cache 613 x 48 6.90 and
    # 7.02 (6.88), 4096 x 32 25.23 and 25.14 (25.16). Two vectors of a row to a thread: 4.13, 3.06,
    # 2.56.
    resident = 2048 * num_sms
    return Layout(
        one_row_block=128,
        two_rows_block=256,
        two_rows_threads=resident,
        large_block=512,
        large_threads=16 * resident,
        flat_block=256,
        flat_threads=4 * resident,
        parts_block=256,
        parts_threads=resident,
        programmatic=capability >= (9, 0),
    )


class LoadedMerge(NamedTuple):
    """The kernels of a device by name, and how merges are cut there."""

    functions: dict[str, int]
    layout: Layout


class PlacedState(NamedTuple):
    """A state in memory; strides of parts, tokens, heads and dims are 0 over one element."""

    out: torch.Tensor
    lse: torch.Tensor | None
    out_strides: tuple[int, ...]
    lse_strides: tuple[int, ...]
    part: int = 0  # of a stack, that it begins with

    def has_rows(self, heads: int) -> bool:
        """Whether (token, head) can be one index."""
        out, lse = self.out_strides, self.lse_strides
        return out[1] == heads * out[2] and lse[1] == heads * lse[2]

    def is_aligned(self, num_bytes: int) -> bool:
        steps = self.offsets()[0] + self.out.data_ptr()
        for stride in self.out_strides[:3]:
            steps |= stride * self.out.itemsize
        return self.out_strides[3] == 1 and steps % num_bytes == 0

    def offsets(self) -> tuple[int, int]:
        """Bytes from the begin of both tensors."""
        steps = self.out_strides[0] * self.out.itemsize, self.lse_strides[0] * 4
        return steps[0] * self.part, steps[1] * self.part


def merge(
    states: tuple[AttentionState, ...],
    stacked: bool,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Write the merge of `states`, or of dimension 0 of the only one, into `out` and `lse`."""
    functions, layout = load_kernels(out.device)
    num_parts = states[0].out.shape[0] if stacked else len(states)
    num_rows, heads, head_dim = out.shape[0] * out.shape[1], out.shape[1], out.shape[2]
    if num_rows > LARGEST or head_dim > LARGEST or num_parts > LARGEST:
        raise ValueError(f"CUDA merge: there are 2^31 rows, columns or parts in {tuple(out.shape)}")
    placed = [_place(*state, stacked) for state in states]
    if stacked and num_parts == 2:  # two parts are two sources: the faster kernel
        placed = [placed[0], placed[0]._replace(part=1)]
    all_states = [_place(out, lse, False), *placed]
    joins = heads > 1 and (out.shape[0] == 1 or all(x.has_rows(heads) for x in all_states))
    if joins:
        all_states = [
            x._replace(
                out_strides=(x.out_strides[0], *x.out_strides[2:3] * 2, x.out_strides[3]),
                lse_strides=(x.lse_strides[0], *x.lse_strides[2:] * 2),
            )
            for x in all_states
        ]
    is_one_index = joins or heads == 1
    name, grid, block = choose_launch(
        all_states, num_rows, head_dim, num_parts, is_one_index, layout
    )
    dtypes = DTYPES[states[0].out.dtype], DTYPES[out.dtype]
    num_heads, step = 1 if is_one_index else heads, int(len(placed) > 1)
    head = HEAD.pack(num_rows, num_heads, head_dim, num_parts, step, 0)
    content, fields = _struct_of(head, all_states)
    function = functions["_".join((name, *dtypes))]
    start = StructStart(function, grid, block, int(layout.programmatic), content, fields)
    launch_struct(start, out.device)


def _place(out: torch.Tensor, lse: torch.Tensor | None, stacked: bool) -> PlacedState:
    def strides(x: torch.Tensor) -> tuple[int, ...]:
        own = tuple(0 if n == 1 else step for n, step in zip(x.shape, x.stride(), strict=True))
        return own if stacked else (0, *own)

    return PlacedState(out, lse, strides(out), (0, 0, 0) if lse is None else strides(lse))


def _struct_of(head: bytes, states: list[PlacedState]) -> tuple[bytes, tuple[PointerField, ...]]:
    """The struct that kernels take, and its pointers; parts of two sources have no stride."""
    content, fields = head, list[PointerField]()
    for state in states:
        given = (state.out, state.lse)
        for i, (tensor, offset) in enumerate(zip(given, state.offsets(), strict=True)):
            if tensor is not None:
                fields.append(PointerField(len(content) + 8 * i, tensor, offset))
        content += STATE.pack(0, 0, *state.out_strides, *state.lse_strides)
    return content, tuple(fields)


def choose_launch(
    states: list[PlacedState],  # the merged one, then the sources
    num_rows: int,
    head_dim: int,
    num_parts: int,
    is_one_index: bool,
    layout: Layout,
) -> tuple[str, tuple[int, int, int], tuple[int, int, int]]:
    """The variant of the kernel, its grid and its block."""
    merged, *sources = states
    width = 16 // sources[0].out.itemsize
    is_vector = head_dim % width == 0 and merged.is_aligned(min(width * merged.out.itemsize, 16))
    is_vector = is_vector and all(source.is_aligned(16) for source in sources)
    kind = "vector" if is_vector else "scalar"
    lanes = head_dim // width if is_vector else head_dim
    threads = num_rows * lanes
    if len(sources) != 2:
        block, lanes = layout.parts_block, min(lanes, layout.parts_block)
        groups = 1
        # each group keeps at least two parts
        while (
            groups * 4 <= num_parts
            and lanes * groups * 2 <= block
            and groups < 32
            and threads * groups < layout.parts_threads
        ):
            groups *= 2
        rows = block // (lanes * groups)
        return f"parts_{kind}", (-(-num_rows // rows), 1, 1), (lanes, rows, groups)
    is_flat = is_vector and threads < layout.flat_threads and lanes <= layout.flat_block
    if is_flat and is_one_index and _are_near(states, num_rows, head_dim):
        name, block, rows_a_thread = "flat_vector", layout.flat_block, 1
    elif is_vector and threads >= layout.two_rows_threads:
        is_large = threads >= layout.large_threads
        block = layout.large_block if is_large else layout.two_rows_block
        name, rows_a_thread = "pair2_vector", 2
    else:
        name, block, rows_a_thread = f"pair1_{kind}", layout.one_row_block, 1
    lanes = min(lanes, block)
    rows = block // lanes
    return name, (-(-num_rows // (rows * rows_a_thread)), 1, 1), (lanes, rows, 1)


def _are_near(states: list[PlacedState], num_rows: int, head_dim: int) -> bool:
    """Whether all offsets of rows in elements fit into 32 bits."""
    most = ((1 << 32) - 1 - head_dim) // num_rows
    steps = (step for x in states for step in (x.out_strides[1], x.lse_strides[1]))
    return all(0 <= step <= most for step in steps)


@cache
def load_kernels(device: torch.device) -> LoadedMerge:
    """The kernels, or an error that says why this device cannot run them."""
    if device.type != "cuda" or torch.version.hip is not None:
        raise RuntimeError(f"impl='cuda' needs a tensor on an NVIDIA GPU, got one on {device}")
    if connect_launches() is None:
        raise RuntimeError("impl='cuda' needs a C compiler, Python.h and a driver since CUDA 12.3")
    index = torch.cuda.current_device() if device.index is None else device.index
    properties = torch.cuda.get_device_properties(index)
    capability = properties.major, properties.minor
    if capability < (8, 0):
        raise RuntimeError(f"impl='cuda' needs compute capability 8.0, {device} has {capability}")
    cubin = build_cubin((SOURCES / "merge.cu").read_text(), "sm_{}{}".format(*capability))
    functions = driver.load_functions(index, cubin, KERNELS)
    layout = select_layout(capability, properties.multi_processor_count)
    return LoadedMerge(dict(zip(KERNELS, functions, strict=True)), layout)


def load(device: torch.device) -> object:
    """The launcher, or an error that says why this device cannot run it."""
    load_kernels(device)
    return merge
