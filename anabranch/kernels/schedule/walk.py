"""The walk of one worker through its share of a schedule, an item at a time.

An *item* is a block with a range of its tiles. Every partition of a program walks by itself: the
schedule is fixed, so nothing has to be handed from one to another.
"""

import triton
import triton.language as tl

from anabranch.kernels.schedule.schedule_layout import (
    HEADER,
    RECORD,
    WORKER,
    part_of,
    read_record,
    units_of,
)


@triton.jit
def begin_walk(schedule_ptr, worker, W: tl.constexpr):
    """(unit, block, place): the first unit, the block it lies in, and where that is written."""
    worker = tl.minimum(worker, W.division.num_workers - 1)
    place = HEADER + worker * WORKER
    return worker * tl.load(schedule_ptr), tl.load(schedule_ptr + place), place + 8


@triton.jit
def take_item(schedule_ptr, walk, worker, W: tl.constexpr):
    """The next item: (walk after it, block, tiles, part).

    Of the block: origin, first_row, q_start, q_len, seq_len. Tiles are [tile, stop), an empty range
    at the end of the share. Of the part: part, num_parts, first_slot.
    """
    unit, block, place = walk
    share = tl.load(schedule_ptr)
    end = tl.minimum((worker + 1) * share, tl.load(schedule_ptr + 1))
    end = tl.where(worker < W.division.num_workers, end, unit)
    origin, first_row, q_start, q_len, seq_len, first_tile, num_tiles, first_unit = read_record(
        schedule_ptr + place
    )
    tile, stop, part, num_parts, first_slot = 0, 0, 0, 1, 0
    while (unit < end) & (tile >= stop):
        num_rows = q_len * W.group
        begin = unit - first_unit
        units = units_of(num_tiles, num_rows, W)
        if begin >= units:
            block += 1
            place = HEADER + W.division.num_workers * WORKER + block * RECORD
            origin, first_row, q_start, q_len, seq_len, first_tile, num_tiles, first_unit = (
                read_record(schedule_ptr + place)
            )
        else:
            last = begin + 1 if W.division.fixed_parts else tl.minimum(units, end - first_unit)
            unit = first_unit + last
            tile, stop, part, num_parts, first_slot = part_of(
                begin, last, worker, share, (num_rows, first_tile, num_tiles, first_unit), W
            )
    return (
        (unit, block, place),
        (origin, first_row, q_start, q_len, seq_len),
        (tile, stop),
        (part, num_parts, first_slot),
    )
