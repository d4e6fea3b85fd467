"""Where parts wait for their merge: slots in kernels, and their room in the memory of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Generic, NamedTuple, TypeVar

import torch
import triton
import triton.language as tl

from anabranch.kernels.constants import AttendConstants
from anabranch.kernels.load.arguments import Rows
from anabranch.keys import KeySource

ALIGNMENT = 128  # bytes, a line of the cache
Program = TypeVar("Program")


class Piece(NamedTuple):
    """Where a tensor lies in a room."""

    offset: int  # bytes
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def stop(self) -> int:
        """The first byte after it."""
        return self.offset + self.dtype.itemsize * prod(self.shape)

    def open(self, rooms: dict[torch.dtype, torch.Tensor]) -> torch.Tensor:
        """The tensor, which shares the memory of the room that is given as each dtype."""
        room = rooms[self.dtype]
        start = room.storage_offset() + self.offset // self.dtype.itemsize
        return room.as_strided(self.shape, self.strides, start)


def arrange(*tensors: tuple[torch.dtype, tuple[int, ...]]) -> tuple[Piece, ...]:
    """Pieces one after another; the room they need ends where the last one stops."""
    pieces: list[Piece] = []
    offset = 0
    for dtype, shape in tensors:
        strides = tuple(prod(shape[place:]) for place in range(1, len(shape) + 1))
        pieces.append(Piece(offset, dtype, shape, strides))
        offset = -(-pieces[-1].stop // ALIGNMENT) * ALIGNMENT
    return tuple(pieces)


class Parts(NamedTuple):
    """Slots in which parts wait for their merge."""

    outs: torch.Tensor  # float32 [num_slots, block_m, block_dv]
    lses: torch.Tensor  # float32 [num_slots, block_m]
    counters: torch.Tensor  # int32 [num_slots], all 0 between launches


class StateRows(NamedTuple):
    """Where states go: rows [num_tokens, num_heads, ...] of the output, or slots."""

    out: Rows
    lse: Rows
    parts: Parts


@dataclass(frozen=True, slots=True)
class OpenPlan(Generic[Program]):
    """A division of work in device memory, and what the kernel that reads it is compiled for."""

    program: Program
    schedule: torch.Tensor  # int32
    counters: torch.Tensor  # int32, those of parts and before them others; 0 between launches
    parts: Parts


@dataclass(frozen=True, slots=True)
class PartsLayout(Generic[Program]):
    """The same without memory."""

    program: Program
    schedule: Piece
    outs: Piece
    lses: Piece
    counters: Piece
    slots: int
    num_others: int  # counters before those of parts

    @property
    def size(self) -> int:
        """Bytes of the room."""
        return self.counters.stop

    def open(self, room: torch.Tensor) -> OpenPlan[Program]:
        """The plan in a room."""
        rooms = {dtype: room.view(dtype) for dtype in (torch.int32, torch.float32)}
        counters = self.counters.open(rooms)
        parts = Parts(self.outs.open(rooms), self.lses.open(rooms), counters[self.num_others :])
        return OpenPlan(self.program, self.schedule.open(rooms), counters, parts)


def lay_out_parts(
    program: Program,
    *,
    schedule_ints: int,
    slots: int,
    rows: tuple[int, ...],  # of all slots
    width: int,
    num_counters: int,
    num_others: int = 0,
) -> PartsLayout[Program]:
    """Room for a schedule, for parts and for counters."""
    pieces = arrange(
        (torch.int32, (schedule_ints,)),
        (torch.float32, (*rows, width)),
        (torch.float32, rows),
        (torch.int32, (num_others + num_counters,)),
    )
    return PartsLayout(program, *pieces, slots=slots, num_others=num_others)


def num_slots(keys: KeySource, blocks: int, constants: AttendConstants) -> int:
    """Two for each worker; with fixed parts, one for each part that there can be.

    Where parts are folded, only those of blocks that several workers hold wait: at most one such
    block begins in a worker's share.
    """
    division = constants.division
    if not division.fixed_parts:
        return 2 * division.num_workers * constants.num_kv_heads
    part = division.part_tiles * constants.tiles.block_n  # shorter blocks are not cut
    per_block = min(-(-keys.capacity // part), division.most_parts)
    per_seq = -(-division.whole_rows // constants.tiles.block_m)  # blocks of what is cut at all
    by_length = per_seq * (keys.total_capacity // part + keys.num_seqs)
    if division.folds_parts:
        cut = min(division.num_workers, blocks, per_seq * keys.num_seqs)
        return max(min(cut * per_block, by_length), 1) * constants.num_kv_heads
    return max(min(blocks * per_block, blocks + by_length), blocks) * constants.num_kv_heads


@triton.jit
def slot_of(part, first_slot, kv_head, C: tl.constexpr):
    """The slot of a part (int64). With fixed parts every unit of work has one for each kv head.

    Otherwise first_slot is the block's first worker; a worker may end one block and begin another,
    so it has two.
    """
    slot = first_slot + part
    if not C.division.fixed_parts:
        slot = 2 * slot + (part == 0)
    return slot.to(tl.int64) * C.num_kv_heads + kv_head


@triton.jit
def slot_rows(part, rows, item, C: tl.constexpr):
    """Where rows of a part wait (int64)."""
    return slot_of(part, item.first_slot, item.kv_head, C) * C.tiles.block_m + rows


@triton.jit
def rows_left(block, C: tl.constexpr):
    """Rows of a block's sequence from its first one on; those of the block are BLOCK_M at most."""
    return block.q_len * C.group - block.first_row


@triton.jit
def store_slot(out, lse, part, rows, num_rows, item, parts, C: tl.constexpr):
    """Write the rows of a part below `num_rows`, which belong to a token, into its slot."""
    slot = slot_of(part, item.first_slot, item.kv_head, C)
    inside = rows < num_rows
    places = slot * C.tiles.block_m + rows
    dims = tl.arange(0, C.tiles.block_dv)
    tl.store(parts.outs + places[:, None] * C.tiles.block_dv + dims[None, :], out, inside[:, None])
    tl.store(parts.lses + places, lse, inside)


@triton.jit
def leave_part(out, lse, part, item, parts, C: tl.constexpr):
    """Leave a part of an item's block where the merge looks for it."""
    left = rows_left(item.block, C)
    store_slot(out, lse, part, tl.arange(0, C.tiles.block_m), left, item, parts, C)


@triton.jit
def write_rows(out, lse, rows, item, results, C: tl.constexpr):
    """Write finished rows of an item's sequence; those after its last belong to no token."""
    outs, lses = results.out, results.lse
    num_rows = item.block.q_len * C.group
    tokens = (item.block.q_start + rows // C.group).to(tl.int64)
    heads = item.kv_head * C.group + rows % C.group
    dims = tl.arange(0, C.tiles.block_dv)
    inside = rows < num_rows
    offsets = tokens * outs.token + heads.to(tl.int64) * outs.head
    ptrs = outs.ptr + offsets[:, None] + (dims * outs.dim)[None, :]
    mask = inside[:, None] & (dims < C.head_dim_v)[None, :]
    tl.store(ptrs, out.to(outs.ptr.dtype.element_ty), mask)
    tl.store(lses.ptr + tokens * lses.token + heads.to(tl.int64) * lses.head, lse, inside)
