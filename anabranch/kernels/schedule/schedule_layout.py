"""What a schedule holds, and how kernels read it: header, workers, blocks, sequences.

Blocks that may be dealt out whole stand there twice, the second time longest first.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import constexpr_function

from anabranch.kernels.constants import AttendConstants

HEADER: tl.constexpr = tl.constexpr(8)  # as `read_header` returns it
RECORD: tl.constexpr = tl.constexpr(8)  # of a block, as `read_record` returns it
LEVELS: tl.constexpr = tl.constexpr(1024)  # lengths that the sort of blocks tells apart
# A worker's first block, the first slot of the block that is cut at its end, and from 8 on a copy
# of the first block's record.
WORKER: tl.constexpr = tl.constexpr(16)


def num_blocks_bound(num_seqs: int, num_tokens: int, constants: AttendConstants) -> int:
    """Blocks there can be: every sequence, and the tokens of nobody, may end in a short one."""
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
    """(units of a share, all units, blocks, empty blocks, first token of nobody, rounds or 0)."""
    return (
        tl.load(schedule_ptr),
        tl.load(schedule_ptr + 1),
        tl.load(schedule_ptr + 2),
        tl.load(schedule_ptr + 3),
        tl.load(schedule_ptr + 4),
        tl.load(schedule_ptr + 5),
    )


@triton.jit
def read_record(record):
    """(origin, first_row, q_start, q_len, seq_len, first_tile, num_tiles, first_unit).

    `origin` is the block's own row of the page table, or where its contiguous keys begin.
    """
    return (
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
def read_block(schedule_ptr, block, C: tl.constexpr):
    """The record of a block."""
    return read_record(schedule_ptr + HEADER + C.division.num_workers * WORKER + block * RECORD)


@triton.jit
def read_dealt(schedule_ptr, place, num_blocks, C: tl.constexpr):
    """The record of the block at this place among those sorted by length."""
    return read_block(schedule_ptr, num_blocks + place, C)


@triton.jit
def read_worker(schedule_ptr, worker):
    """The block a worker begins in, and its record: nothing to wait for but one load."""
    ptr = schedule_ptr + HEADER + worker * WORKER
    return tl.load(ptr), read_record(ptr + 8)


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
    num_rows, _, num_tiles, first_unit = block
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
def parts_held(begin, end, share, block, schedule_ptr, C: tl.constexpr):
    """Fixed parts that begin in units [begin, end) of a block, which one worker holds.

    Tiles [tile, stop), the first part, their number, the parts of the block, the tiles of a part,
    and what tells the merge where parts wait.
    """
    num_rows, first_tile, num_tiles, _ = block
    size = part_tiles_of(num_tiles, num_rows, C)
    num_parts = tl.cdiv(num_tiles, size)
    part, last, first_slot = 0, num_parts, 0
    if (begin > 0) | (end < num_parts * size):  # divisions that a whole block does without
        part, last = tl.cdiv(begin, size), tl.cdiv(end, size)
        _, first_slot = parts_of(schedule_ptr, share, block, C)
    stop = first_tile + tl.minimum(last * size, num_tiles)
    return first_tile + part * size, stop, part, last - part, num_parts, size, first_slot


@triton.jit
def part_of(begin, end, worker, share, block, C: tl.constexpr):
    """What units [begin, end) of a block are: tiles [tile, stop), part `part` of `num_parts`.

    first_slot tells the merge tree where the block's parts wait.
    """
    num_rows, first_tile, num_tiles, _ = block
    num_parts, first_slot = parts_of(None, share, block, C)
    if C.division.fixed_parts:
        size = part_tiles_of(num_tiles, num_rows, C)
        tile, stop = begin * size, tl.minimum(end * size, num_tiles)
        part = begin
    else:
        tile, stop = (
            tl.maximum(begin - C.division.block_price, 0),
            tl.maximum(end - C.division.block_price, 0),
        )
        part = worker - first_slot
    return first_tile + tile, first_tile + stop, part, num_parts, first_slot


@triton.jit
def pair_of(turn, programs, C: tl.constexpr):
    """The place among the blocks, longest first, and the kv head of a program's turn.

    Turns go through the pairs to and fro: who has the longest of one round has the shortest of the
    next.
    """
    place = tl.where(turn % 2 == 0, programs, C.division.num_programs - 1 - programs)
    index = turn * C.division.num_programs + place
    return index // C.num_kv_heads, index % C.num_kv_heads
