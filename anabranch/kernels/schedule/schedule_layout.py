"""What a schedule holds, and how kernels read it: header, workers, blocks, sequences.

Blocks that may be dealt out whole stand there twice, the second time longest first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton import constexpr_function

from anabranch.kernels.constants import AttendConstants

HEADER: tl.constexpr = tl.constexpr(8)  # a ScheduleHeader, padded
RECORD: tl.constexpr = tl.constexpr(8)  # a Block
LEVELS: tl.constexpr = tl.constexpr(1024)  # lengths that the sort of blocks tells apart
# A worker's first block, the first slot of the block that is cut at its end, and from 8 on a copy
# of the first block's record.
WORKER: tl.constexpr = tl.constexpr(16)


class ScheduleHeader(NamedTuple):
    """What holds for the whole schedule."""

    share: Any  # units of a worker
    num_units: Any
    num_blocks: Any
    num_empty: Any  # blocks that see no keys
    orphans: Any  # the first token that belongs to no sequence
    num_rounds: Any  # in which blocks are dealt out whole, or 0


class Block(NamedTuple):
    """A record: some rows of one sequence, and the tiles of keys that they see."""

    origin: Any  # its own row of the page table, or where its contiguous keys begin
    first_row: Any
    q_start: Any
    q_len: Any
    seq_len: Any
    first_tile: Any
    num_tiles: Any
    first_unit: Any


def num_blocks_bound(num_seqs: int, num_tokens: int, constants: AttendConstants) -> int:
    """Blocks there can be: every sequence, and the orphan tokens, may end in a short one."""
    return triton.cdiv(num_tokens * constants.group, constants.tiles.block_m) + num_seqs + 1


def schedule_size(num_seqs: int, num_tokens: int, constants: AttendConstants) -> int:
    """Integers in the schedule: header, workers, blocks, first block of each sequence.

    Where blocks may be dealt out whole, there is a sorted copy of them and room to sort in.
    """
    blocks = num_blocks_bound(num_seqs, num_tokens, constants)
    workers = constants.division.num_workers * WORKER.value
    size = HEADER.value + workers + blocks * RECORD.value + num_seqs + 1
    return size + (blocks * RECORD.value + LEVELS.value if is_dealt(constants) else 0)


@constexpr_function
def is_dealt(constants: AttendConstants) -> bool:
    """Whether blocks may be dealt out whole: those of many rows are enough to fill the GPU."""
    division = constants.division
    may_deal = division.deals and (division.folds_parts or not division.fixed_parts)
    return constants.tiles.block_m >= 64 and may_deal


@triton.jit
def read_header(schedule_ptr):
    return ScheduleHeader(
        tl.load(schedule_ptr),
        tl.load(schedule_ptr + 1),
        tl.load(schedule_ptr + 2),
        tl.load(schedule_ptr + 3),
        tl.load(schedule_ptr + 4),
        tl.load(schedule_ptr + 5),
    )


@triton.jit
def read_record(record):
    return Block(
        tl.load(record),
        tl.load(record + 1),
        tl.load(record + 2),
        tl.load(record + 3),
        tl.load(record + 4),
        tl.load(record + 5),
        tl.load(record + 6),
        tl.load(record + 7),
    )


@triton.jit
def block_place(index, C: tl.constexpr):
    """Where the record of a block stands in the schedule."""
    return HEADER + C.division.num_workers * WORKER + index * RECORD


@triton.jit
def read_block(schedule_ptr, index, C: tl.constexpr):
    return read_record(schedule_ptr + HEADER + C.division.num_workers * WORKER + index * RECORD)


@triton.jit
def units_of(num_tiles, num_rows, C: tl.constexpr):
    """How many units of work a block has.

    A tile is a unit, and beginning a block costs as much as block_price tiles. Of parts that are
    folded, the last counts as a whole one; of other fixed parts, each is a unit.
    """
    if C.division.fixed_parts:
        size = part_tiles_of(num_tiles, num_rows, C)
        units = tl.cdiv(num_tiles, size)
        if C.division.folds_parts:
            units *= size
    else:
        units = tl.where(num_tiles > 0, num_tiles + C.division.block_price, 0)
    return units


@triton.jit
def part_tiles_of(num_tiles, num_rows, C: tl.constexpr):
    """How many tiles a fixed part of a block has: as the block's own sequence says, no other.

    Short blocks are not cut: 3 queries of 8 x 259, 64/8 heads, take 12.8 us on an H200, in parts of
    two tiles 14.1. Neither are sequences of whole_rows query rows, which fill the GPU.
    """
    size = tl.maximum(tl.cdiv(num_tiles, C.division.most_parts), C.division.part_tiles)
    is_whole = (num_rows >= C.division.whole_rows) | (num_tiles <= 2 * C.division.part_tiles)
    return tl.where(is_whole, tl.maximum(num_tiles, 1), size)


@triton.jit
def holders_of(share, num_tiles, num_rows, first_unit, C: tl.constexpr):
    """The first and the last worker that hold a fixed part of a block: who holds its first tile."""
    size = part_tiles_of(num_tiles, num_rows, C)
    last_part = (tl.cdiv(num_tiles, size) - 1) * size
    return first_unit // share, (first_unit + last_part) // share


@triton.jit
def parts_of(schedule_ptr, share, block, C: tl.constexpr):
    """How many parts of a block are left to merge, and what tells the merge where they wait."""
    num_rows = block.q_len * C.group
    num_tiles, first_unit = block.num_tiles, block.first_unit
    if C.division.folds_parts:
        num_parts = tl.cdiv(num_tiles, part_tiles_of(num_tiles, num_rows, C))
        first, last = holders_of(share, num_tiles, num_rows, first_unit, C)
        num_parts = tl.where(first == last, 1, num_parts)
        first_slot = tl.load(schedule_ptr + HEADER + first * WORKER + 1)
    elif C.division.fixed_parts:
        num_parts = tl.cdiv(num_tiles, part_tiles_of(num_tiles, num_rows, C))
        first_slot = first_unit
    else:
        first_slot = (first_unit + C.division.block_price) // share
        last_slot = (first_unit + C.division.block_price + num_tiles - 1) // share
        num_parts = last_slot - first_slot + 1
    return num_parts, first_slot


@triton.jit
def place_in_round(turn, programs, C: tl.constexpr):
    """The place among the blocks, longest first, and the kv head of a program's turn.

    Turns go through blocks and heads to and fro: who has the longest of one round has the shortest
    of the next.
    """
    place = tl.where(turn % 2 == 0, programs, C.division.num_programs - 1 - programs)
    index = turn * C.division.num_programs + place
    return index // C.num_kv_heads, index % C.num_kv_heads
