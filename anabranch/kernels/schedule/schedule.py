"""The plan, made on the device: which keys of which rows each worker attends to.

Queries are cut into blocks of block_m rows (token, head in group) of one sequence, keys into tiles
of block_n. The tiles of all blocks stand in one list, each block's after a price for beginning it;
worker w takes the units [w * share, (w + 1) * share) of it. So every worker has equal work, a block
that crosses a boundary leaves parts to merge, and there are at most two such parts a worker,
whatever the batch.

A worker is a team of programs, one for each kv head, launched side by side: what they read lies
side by side in memory too.

Blocks of many rows may be dealt out whole instead, over all programs (deal.py).

With fixed parts, blocks are cut at boundaries that depend on their own sequence alone, and each
part is a state of its own: results do not depend on the rest of the batch. A worker has the parts
that begin in its share. If these are all parts of a block, it merges them as it goes; at most one
block that begins in a share does not end there, and the parts of that wait in slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from anabranch.call import AttendCall
from anabranch.kernels.constants import AttendConstants, Division
from anabranch.kernels.schedule.align import align_blocks, aligned_share
from anabranch.kernels.schedule.cut_blocks import (
    SIZES,
    Lengths,
    clear,
    count_blocks,
    cut_blocks,
    last_not_above,
    query_range,
    store_blocks,
)
from anabranch.kernels.schedule.deal import longest_turns, sort_blocks
from anabranch.kernels.schedule.walk import (
    HEADER,
    LEVELS,
    RECORD,
    WORKER,
    holders_of,
    part_tiles_of,
    units_of,
)
from anabranch.launches.recorder import launch

# From this count on the balance is estimated, not summed.
MANY_ROUNDS: tl.constexpr = tl.constexpr(64)


@dataclass(frozen=True, slots=True, eq=False)
class ScheduleConstants:
    """What a schedule is compiled for: not how keys are stored, nor how tiles are multiplied."""

    causal: bool
    group: int
    num_kv_heads: int
    block_m: int
    block_n: int
    group_parts: int
    division: Division


@cache
def schedule_constants(constants: AttendConstants) -> ScheduleConstants:
    """The part of the constants that the schedule is compiled for."""
    return ScheduleConstants(
        constants.causal,
        constants.group,
        constants.num_kv_heads,
        constants.tiles.block_m,
        constants.tiles.block_n,
        constants.merging.group_parts,
        constants.division,
    )


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
    return size + (blocks * RECORD.value + LEVELS.value if constants.division.deals else 0)


def schedule(
    buffer: torch.Tensor,  # int32 [schedule_size(...)]
    counters: torch.Tensor,  # int32, of parts that arrive; made 0
    call: AttendCall,
    constants: AttendConstants,
) -> None:
    """Fill `buffer` from lengths that stay on the device."""
    queries, keys = call.queries, call.keys
    num_tokens, num_seqs = queries.packed.shape[0], keys.num_seqs
    launch(
        schedule_kernel,
        (1,),
        buffer,
        counters,
        queries.cu_seqlens,
        *keys.lengths,
        queries.q_len,
        keys.capacity,
        num_seqs,
        num_tokens,
        num_blocks_bound(num_seqs, num_tokens, constants),
        counters.numel(),
        call.rules.window,
        schedule_constants(constants),
        num_warps=8,
    )


@triton.jit(do_not_specialize=SIZES)
def schedule_kernel(
    schedule_ptr,  # header, workers [num_workers, WORKER], blocks [max_blocks, RECORD], sequences
    counters_ptr,  # [num_counters]
    cu_seqlens_q_ptr,  # these are Lengths
    seq_lens_ptr,
    cu_seqlens_k_ptr,
    q_len_of_all,
    max_len,
    num_seqs,
    num_tokens,
    max_blocks,
    num_counters,
    window,  # or None
    C: tl.constexpr,  # ScheduleConstants
    CHUNK: tl.constexpr = 256,
):
    lengths = Lengths(
        cu_seqlens_q_ptr,
        seq_lens_ptr,
        cu_seqlens_k_ptr,
        q_len_of_all,
        max_len,
        num_seqs,
        num_tokens,
    )
    blocks_ptr = schedule_ptr + HEADER + C.division.num_workers * WORKER
    seqs_ptr = blocks_ptr + max_blocks * (2 if C.division.deals else 1) * RECORD
    lanes = tl.arange(0, CHUNK)
    clear(counters_ptr, num_counters)

    num_blocks = 0  # before each sequence
    for start in range(0, num_seqs + 1, CHUNK):
        seqs = start + lanes
        blocks = count_blocks(seqs, lengths, C.group, C.block_m)
        tl.store(seqs_ptr + seqs, num_blocks + tl.cumsum(blocks) - blocks, seqs <= num_seqs)
        num_blocks += tl.sum(blocks)
    num_blocks = tl.minimum(num_blocks, max_blocks)
    tl.debug_barrier()

    num_units = 0  # before each block
    num_empty = 0
    most = 0
    least = 2147483647
    largest = 1  # fixed part; a constant 0 that may divide fails Triton 3.7 and 3.8
    smallest = 2147483647
    for start in range(0, num_blocks, CHUNK):
        blocks = start + lanes
        inside = blocks < num_blocks
        block, sees_keys = cut_blocks(
            blocks, seqs_ptr, lengths, window, C.group, C.block_m, C.block_n, C.causal
        )
        num_rows = block.q_len * C.group
        num_tiles = tl.where(sees_keys, block.num_tiles, 0)
        units = units_of(num_tiles, num_rows, C)
        units = tl.where(inside, units, 0)
        num_empty += tl.sum((inside & (units == 0)).to(tl.int32))
        most = tl.maximum(most, tl.max(units))
        least = tl.minimum(least, tl.min(tl.where(units > 0, units, 2147483647)))
        if C.division.folds_parts:
            size = part_tiles_of(num_tiles, num_rows, C)
            largest = tl.maximum(largest, tl.max(tl.where(units > 0, size, 0)))
            smallest = tl.minimum(smallest, tl.min(tl.where(units > 0, size, 2147483647)))
        record = blocks_ptr + blocks * RECORD
        store_blocks(record, block, num_tiles, inside)
        tl.store(record + 7, num_units + tl.cumsum(units) - units, inside)
        num_units += tl.sum(units)
    tl.debug_barrier()

    share = tl.maximum(tl.cdiv(num_units, C.division.num_workers), 1)
    extremes = (most, least, largest, smallest)
    share = rounded_share(share, num_blocks - num_empty, extremes, C)
    if C.division.aligned_growth > 0 and not C.division.fixed_parts:
        aligned = aligned_share(blocks_ptr, num_blocks, share, C, CHUNK)
        if aligned > 0:
            share = aligned
            num_units = align_blocks(blocks_ptr, num_blocks, share, C, CHUNK)
    num_rounds = 0
    if C.division.deals:
        dealt_ptr = blocks_ptr + num_blocks * RECORD
        counts_ptr = seqs_ptr + num_seqs + 1
        sort_blocks(blocks_ptr, dealt_ptr, counts_ptr, num_blocks, most, CHUNK)
        num_rounds = rounds_of(dealt_ptr, num_blocks, most, share, C, CHUNK)
    tl.store(schedule_ptr + 5, num_rounds)
    tl.store(schedule_ptr, share)
    tl.store(schedule_ptr + 1, num_units)
    tl.store(schedule_ptr + 2, num_blocks)
    tl.store(schedule_ptr + 3, num_empty)
    orphans, _ = query_range(num_seqs, lengths)
    tl.store(schedule_ptr + 4, orphans)
    write_workers(schedule_ptr, blocks_ptr, num_blocks, num_units, share, C, CHUNK)


@triton.jit
def rounded_share(share, num_blocks, extremes, C: tl.constexpr):
    """Units of a share. Whole blocks, if they are of one size and that costs less than merging.

    Shares of fixed parts of one size end where parts do, or even groups of them.
    """
    most, least, largest, smallest = extremes
    if most == least:
        whole = tl.cdiv(num_blocks, C.division.num_workers) * most
        share = tl.where(whole <= share + C.division.merge_price, whole, share)
    share = tl.maximum(share, C.division.least_share)
    if C.division.folds_parts:  # noqa: SIM102 - one is known when compiling, the other is not
        if largest == smallest:
            share = tl.cdiv(share, largest) * largest
            group = largest * C.group_parts
            grouped = tl.cdiv(share, group) * group
            share = tl.where(grouped * 25 <= share * 26, grouped, share)
    return share


@triton.jit
def rounds_of(dealt_ptr, num_blocks, most, share, C: tl.constexpr, CHUNK: tl.constexpr):
    """In how many rounds blocks are dealt out whole, or 0 where that is uneven."""
    num_rounds = tl.cdiv(num_blocks * C.num_kv_heads, C.division.num_programs)
    is_even = most * 8 <= share
    if num_rounds < MANY_ROUNDS:
        longest = longest_turns(dealt_ptr, num_blocks, num_rounds, most, C, CHUNK)
        is_even = longest <= share + C.division.merge_price
    return tl.where(is_even, num_rounds, 0)


@triton.jit
def write_workers(
    schedule_ptr, blocks_ptr, num_blocks, num_units, share, C: tl.constexpr, CHUNK: tl.constexpr
):
    """Write the block that each worker begins in, a copy of its record, and its first slot."""
    workers_ptr = schedule_ptr + HEADER
    num_slots = 0  # before each worker's
    for start in range(0, C.division.num_workers, CHUNK):
        workers = start + tl.arange(0, CHUNK)
        block = last_not_above(blocks_ptr + 7, RECORD, num_blocks, workers * share)
        inside = workers < C.division.num_workers
        tl.store(workers_ptr + workers * WORKER, block, inside)
        if C.division.folds_parts:
            slots = slots_of_workers(workers, blocks_ptr, num_blocks, num_units, share, C)
            first_slot = num_slots + tl.cumsum(slots) - slots
            tl.store(workers_ptr + workers * WORKER + 1, first_slot, inside)
            num_slots += tl.sum(slots)
        fields = tl.arange(0, RECORD)[None, :]
        record = tl.load(blocks_ptr + block[:, None] * RECORD + fields)
        tl.store(workers_ptr + (workers * WORKER + 8)[:, None] + fields, record, inside[:, None])


@triton.jit
def slots_of_workers(workers, blocks_ptr, num_blocks, num_units, share, C: tl.constexpr):
    """Slots for the block that begins in a worker's share and does not end there: its parts."""
    end = (workers + 1) * share
    block = last_not_above(blocks_ptr + 7, RECORD, num_blocks, end)
    record = blocks_ptr + block * RECORD
    num_rows, num_tiles = tl.load(record + 3) * C.group, tl.load(record + 6)
    first, last = holders_of(share, num_tiles, num_rows, tl.load(record + 7), C)
    is_cut = (end < num_units) & (first == workers) & (last > first)
    return tl.where(is_cut, tl.cdiv(num_tiles, part_tiles_of(num_tiles, num_rows, C)), 0)
