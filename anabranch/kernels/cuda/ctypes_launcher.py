"""launcher.c in Python, for machines without a C compiler: the same launches, at a higher cost."""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch

from anabranch.kernels.cuda import driver
from anabranch.kernels.cuda.layout import DTYPES, KERNELS, MAX_SOURCES, Layout
from anabranch.state import AttentionState

HEADER = struct.Struct("6I")
STATE = struct.Struct("2Q7q")


class CtypesLauncher:
    """Launches the kernels of one device."""

    def __init__(self, device: int, functions: tuple[int, ...], layout: Layout) -> None:
        self.device = device
        self.functions = dict(zip(KERNELS, functions, strict=True))
        self.layout = layout

    def __call__(
        self,
        states: tuple[AttentionState, ...],
        stacked: bool,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """Write the merge of `states`, or of dimension 0 of the only one, into `out` and `lse`."""
        kernel, grid, block, arguments = plan_launch(states, stacked, out, lse, self.layout)
        stream = torch.cuda.current_stream(self.device).cuda_stream
        driver.launch(self.device, self.functions[kernel], grid, block, stream, arguments)


class Launch(NamedTuple):
    """What the driver needs besides a device and a stream."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    arguments: bytes


class Memory(NamedTuple):
    """The struct State of merge.cu."""

    out: int
    lse: int
    out_strides: tuple[int, ...]  # part, token, head, dim
    lse_strides: tuple[int, ...]  # part, token, head


def plan_launch(
    states: tuple[AttentionState, ...],
    stacked: bool,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    layout: Layout,
) -> Launch:
    """The kernel, its grid and its arguments."""
    num_tokens, num_heads, head_dim = out.shape
    num_rows = num_tokens * num_heads
    if num_rows >= 1 << 31:
        raise ValueError(f"a merge takes at most 2^31 - 1 rows, got {num_rows}")
    num_parts = states[0].out.shape[0] if stacked else len(states)
    if stacked and num_parts == 2:  # two parts are two sources: the faster kernel
        states = tuple(AttentionState(*part) for part in zip(*states[0], strict=True))
    memories = [_describe(*state) for state in ((out, lse), *states)]
    if num_heads > 1 and _rows_are_equally_spaced(memories, num_tokens, num_heads):
        memories = [_join_rows(memory) for memory in memories]
        num_heads = 1

    dtype = states[0].out.dtype
    width = 16 // dtype.itemsize
    vector = (
        head_dim % width == 0
        and _is_aligned(memories[0], out.itemsize, min(16, width * out.itemsize))
        and all(_is_aligned(memory, dtype.itemsize, 16) for memory in memories[1:])
    )
    lanes = head_dim // width if vector else head_dim
    variant, block, rows_of_block = _choose_block(
        len(states), num_parts, num_rows, lanes, vector, layout
    )
    arguments = HEADER.pack(num_rows, num_heads, head_dim, num_parts, len(states) > 1, 0)
    for memory in memories:
        arguments += STATE.pack(*memory[:2], *memory.out_strides, *memory.lse_strides)
    return Launch(
        kernel=f"{variant}_{DTYPES[dtype]}_{DTYPES[out.dtype]}",
        grid=(-(-num_rows // rows_of_block), 1, 1),
        block=block,
        arguments=arguments.ljust(HEADER.size + STATE.size * (1 + MAX_SOURCES), b"\0"),
    )


def _choose_block(
    num_sources: int, num_parts: int, num_rows: int, lanes: int, vector: bool, layout: Layout
) -> tuple[str, tuple[int, int, int], int]:
    access = "vector" if vector else "scalar"
    threads = num_rows * lanes
    if num_sources == 2:
        large = vector and threads >= layout.large_threads
        size = layout.large_block if large else layout.small_block
        lanes = min(lanes, size)
        rows = size // lanes
        return f"pair{1 + large}_{access}", (lanes, rows, 1), rows * (1 + large)
    size = layout.parts_block
    lanes = min(lanes, size)
    groups = 1
    while (  # each group keeps at least two parts
        groups * 4 <= num_parts
        and lanes * groups * 2 <= size
        and groups < 32
        and threads * groups < layout.parts_threads
    ):
        groups *= 2
    rows = size // (lanes * groups)
    return f"parts_{access}", (lanes, rows, groups), rows


def _describe(out: torch.Tensor, lse: torch.Tensor | None) -> Memory:
    return Memory(
        out.data_ptr(),
        0 if lse is None else lse.data_ptr(),
        _strides(out, 4),
        (0, 0, 0) if lse is None else _strides(lse, 3),
    )


def _strides(tensor: torch.Tensor, count: int) -> tuple[int, ...]:
    """The strides, 0 where there is nothing to step over."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    known = tuple(0 if size == 1 else stride for size, stride in steps)
    return (0,) * (count - len(known)) + known


def _rows_are_equally_spaced(memories: list[Memory], num_tokens: int, num_heads: int) -> bool:
    return num_tokens == 1 or all(
        strides[1] == num_heads * strides[2] for memory in memories for strides in memory[2:]
    )


def _join_rows(memory: Memory) -> Memory:
    """(token, head) as one index."""
    (out_part, _, out_head, out_dim), (lse_part, _, lse_head) = memory[2:]
    return memory._replace(
        out_strides=(out_part, out_head, out_head, out_dim),
        lse_strides=(lse_part, lse_head, lse_head),
    )


def _is_aligned(memory: Memory, itemsize: int, num_bytes: int) -> bool:
    steps = (memory.out, *(stride * itemsize for stride in memory.out_strides[:3]))
    return memory.out_strides[3] == 1 and all(step % num_bytes == 0 for step in steps)
