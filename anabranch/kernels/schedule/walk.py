"""What a schedule holds, and the walk of a worker through its share of it, an item at a time.

A schedule is a header, workers, blocks and sequences; blocks that may be dealt out whole stand
there twice, the second time longest first. It is fixed, so the partitions of a warp-specialised
program walk each by itself, and hand nothing to each other.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

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


class Walk(NamedTuple):
    """Where a worker stands: the next unit of its share, and the block that it lies in."""

    unit: Any
    index: Any  # of the block
    place: Any  # of its record in the schedule
    block: Any  # the record, a Block


class Spot(NamedTuple):
    """A walk without the record, which is read again: loops then need no registers for it."""

    unit: Any
    index: Any
    place: Any


class Item(NamedTuple):
    """Tiles [tile, stop) of a block for one kv head: none where the walk only changes the block."""

    block: Any
    kv_head: Any
    tile: Any
    stop: Any
    part: Any  # the first of the block's parts that these tiles are,
    count: Any  # and how many parts they are
    num_parts: Any  # of the block
    part_tiles: Any  # of a fixed part
    first_slot: Any  # tells the merge where the block's parts wait


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


@triton.jit
def begin_walk(worker, share, schedule_ptr, C: tl.constexpr):
    """The walk of a worker before its first item: its first block is read beside it."""
    place = tl.minimum(worker, C.division.num_workers - 1) * WORKER
    ptr = schedule_ptr + HEADER + place
    index, block = tl.load(ptr), read_record(ptr + 8)
    return Walk(worker * share, index, HEADER + place + 8, block)


@triton.jit
def next_item(walk, worker, stop, header, schedule_ptr, C: tl.constexpr):
    """The walk after one more item, and the item. Shares end at the unit `stop`."""
    program = tl.program_id(0)
    kv_head = program % C.num_kv_heads
    unit, index, place, block = walk
    tile, tile_stop, part, count, num_parts, first_slot = 0, 0, 0, 1, 1, 0
    size = 0  # tiles of a fixed part
    num_rounds = header.num_rounds
    if not C.division.deals:
        num_rounds = 0  # known to the compiler
    if num_rounds > 0:
        turn, kv_head = place_in_round(unit, program, C)
        unit += 1
        if turn < header.num_blocks:
            block = read_block(schedule_ptr, header.num_blocks + turn, C)
            tile = block.first_tile
            tile_stop = tile + block.num_tiles
            if C.division.folds_parts:
                size = part_tiles_of(block.num_tiles, block.q_len * C.group, C)
                num_parts = tl.cdiv(block.num_tiles, size)
                count = num_parts
    else:
        begin = unit - block.first_unit
        units = units_of(block.num_tiles, block.q_len * C.group, C)
        if begin >= units:
            index += 1
            place = block_place(index, C)
            block = read_block(schedule_ptr, index, C)
        else:
            end = tl.minimum(units, stop - block.first_unit)
            if C.division.fixed_parts and not C.division.folds_parts:
                end = begin + 1
            unit = block.first_unit + end
            if C.division.folds_parts:
                tile, tile_stop, part, count, num_parts, size, first_slot = parts_held(
                    begin, end, header.share, block, schedule_ptr, C
                )
            else:
                tile, tile_stop, part, num_parts, first_slot = part_held(
                    begin, end, worker, header.share, block, C
                )
    item = Item(block, kv_head, tile, tile_stop, part, count, num_parts, size, first_slot)
    return Walk(unit, index, place, block), item


@triton.jit
def begin_share(worker, schedule_ptr, C: tl.constexpr):
    """Where a worker stands before its first item."""
    worker = tl.minimum(worker, C.division.num_workers - 1)
    place = HEADER + worker * WORKER
    return Spot(worker * tl.load(schedule_ptr), tl.load(schedule_ptr + place), place + 8)


@triton.jit
def take_item(spot, worker, schedule_ptr, C: tl.constexpr):
    """Where a worker stands after its next item that has tiles, and the item: none at the end."""
    share = tl.load(schedule_ptr)
    stop = tl.minimum((worker + 1) * share, tl.load(schedule_ptr + 1))
    stop = tl.where(worker < C.division.num_workers, stop, spot.unit)
    header = ScheduleHeader(share, 0, 0, 0, 0, 0)
    walk = Walk(spot.unit, spot.index, spot.place, read_record(schedule_ptr + spot.place))
    tile, tile_stop, part, num_parts, first_slot = 0, 0, 0, 1, 0
    while (walk.unit < stop) & (tile >= tile_stop):
        walk, item = next_item(walk, worker, stop, header, schedule_ptr, C)
        tile, tile_stop, part = item.tile, item.stop, item.part
        num_parts, first_slot = item.num_parts, item.first_slot
    item = Item(walk.block, 0, tile, tile_stop, part, 1, num_parts, 0, first_slot)
    return Spot(walk.unit, walk.index, walk.place), item


@triton.jit
def parts_held(begin, end, share, block, schedule_ptr, C: tl.constexpr):
    """Fixed parts that begin in units [begin, end) of a block, which one worker holds.

    Tiles [tile, stop), the first part, their number, the parts of the block, the tiles of a part,
    and what tells the merge where parts wait.
    """
    size = part_tiles_of(block.num_tiles, block.q_len * C.group, C)
    num_parts = tl.cdiv(block.num_tiles, size)
    part, last, first_slot = 0, num_parts, 0
    if (begin > 0) | (end < num_parts * size):  # divisions that a whole block does without
        part, last = tl.cdiv(begin, size), tl.cdiv(end, size)
        _, first_slot = parts_of(schedule_ptr, share, block, C)
    stop = block.first_tile + tl.minimum(last * size, block.num_tiles)
    return block.first_tile + part * size, stop, part, last - part, num_parts, size, first_slot


@triton.jit
def part_held(begin, end, worker, share, block, C: tl.constexpr):
    """What units [begin, end) of a block are: tiles [tile, stop), part `part` of `num_parts`.

    first_slot tells the merge where the block's parts wait.
    """
    num_parts, first_slot = parts_of(None, share, block, C)
    if C.division.fixed_parts:
        size = part_tiles_of(block.num_tiles, block.q_len * C.group, C)
        tile, stop = begin * size, tl.minimum(end * size, block.num_tiles)
        part = begin
    else:
        tile = tl.maximum(begin - C.division.block_price, 0)
        stop = tl.maximum(end - C.division.block_price, 0)
        part = worker - first_slot
    return block.first_tile + tile, block.first_tile + stop, part, num_parts, first_slot
