"""The walk of a worker through its share of a schedule, an item at a time.

An *item* is a block with a range of its tiles and one kv head. The schedule is fixed, so the
partitions of a warp-specialised program walk each by itself, and hand nothing to each other.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from anabranch.kernels.schedule.schedule_layout import (
    HEADER,
    WORKER,
    ScheduleHeader,
    block_place,
    is_dealt,
    part_tiles_of,
    parts_of,
    place_in_round,
    read_block,
    read_record,
    units_of,
)


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
    if not is_dealt(C):
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
        tile, stop = (
            tl.maximum(begin - C.division.block_price, 0),
            tl.maximum(end - C.division.block_price, 0),
        )
        part = worker - first_slot
    return block.first_tile + tile, block.first_tile + stop, part, num_parts, first_slot
