"""The plan, made on the device: which keys of which rows each worker attends to.

Queries are cut into blocks of block_m rows (token, head in group) of one sequence, keys into tiles
of block_n. The tiles of all blocks stand in one list, each block's behind a price for beginning it;
worker w takes the units [w * share, (w + 1) * share) of it. So every worker has equal work, a block
that crosses a boundary leaves parts to merge, and there are at most two such parts a worker,
whatever the batch.

A worker is a team of programs, one for each kv head, launched side by side: what they read lies
side by side in memory too.

With fixed parts the list counts parts of part_tiles tiles instead, cut at boundaries that depend on
the sequence alone, and each is a state of its own: results do not depend on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from triton import constexpr_function

from anabranch.kernels.config import AttendConfig, AttendConstants, attend_constants
from anabranch.kernels.triton.masks import seen_by_any

HEADER: tl.constexpr = tl.constexpr(8)  # as `read_header` returns it
RECORD: tl.constexpr = tl.constexpr(8)  # of a block, as `read_record` returns it
LEVELS: tl.constexpr = tl.constexpr(1024)  # lengths that the sort of blocks tells apart
MANY_ROUNDS: tl.constexpr = tl.constexpr(64)  # so many are even enough without a look
WORKER: tl.constexpr = tl.constexpr(16)  # its first block, and a copy of that block's record at 8


def schedule(
    buffer: torch.Tensor,  # int32 [schedule_size(...)]
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_len: int,  # what the storage holds of one sequence; longer lengths are cut
    num_tokens: int,
    window: int | None,
    constants: AttendConstants,
) -> None:
    """Fill `buffer` from lengths that stay on the device."""
    num_seqs = cu_seqlens_q.shape[0] - 1
    max_blocks = num_blocks_bound(num_seqs, num_tokens, constants)
    schedule_kernel[1,](
        buffer,
        cu_seqlens_q,
        seq_lens,
        cu_seqlens_k,
        max_len,
        num_seqs,
        num_tokens,
        max_blocks,
        window,
        constants,
        num_warps=8,
    )


def num_blocks_bound(num_seqs: int, num_tokens: int, constants: AttendConstants) -> int:
    """Blocks there can be: every sequence, and the tokens of nobody, may end in a short one."""
    return triton.cdiv(num_tokens * constants.group, constants.block_m) + num_seqs + 1


def schedule_size(num_seqs: int, num_tokens: int, constants: AttendConstants) -> int:
    """Integers in the schedule: header, workers, blocks, first block of each sequence.

    Where blocks may be dealt out whole, there is a sorted copy of them and room to sort in.
    """
    blocks = num_blocks_bound(num_seqs, num_tokens, constants)
    workers = constants.num_workers * WORKER.value
    size = HEADER.value + workers + blocks * RECORD.value + num_seqs + 1
    return size + (blocks * RECORD.value + LEVELS.value if is_dealt(constants) else 0)


@constexpr_function
def is_dealt(constants: AttendConstants) -> bool:
    """Whether blocks may be dealt out whole: those of many rows are enough to fill the GPU."""
    return constants.block_m >= 64 and not constants.fixed_parts


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
    """(origin, first_row, q_start, q_len, seq_len, first_tile, num_tiles, first_unit)."""
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
    return read_record(schedule_ptr + HEADER + C.num_workers * WORKER + block * RECORD)


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

    A tile is a unit, and beginning a block costs as much as block_price tiles. With fixed parts a
    part is a unit; sequences of whole_rows query rows or more fill the GPU without cutting them.
    """
    if C.fixed_parts:
        units = tl.cdiv(num_tiles, part_tiles_of(num_tiles, num_rows, C))
    else:
        units = tl.where(num_tiles > 0, num_tiles + C.block_price, 0)
    return units


@triton.jit
def part_tiles_of(num_tiles, num_rows, C: tl.constexpr):
    """How many tiles a fixed part of a block has."""
    return tl.where(num_rows >= C.whole_rows, tl.maximum(num_tiles, 1), C.part_tiles)


@triton.jit
def parts_of(share, block, C: tl.constexpr):
    """How many parts a block is cut into, and what tells the merge where they wait."""
    num_rows, _, num_tiles, first_unit = block
    if C.fixed_parts:
        num_parts = tl.cdiv(num_tiles, part_tiles_of(num_tiles, num_rows, C))
        first_slot = first_unit
    else:
        first_slot = (first_unit + C.block_price) // share
        last_slot = (first_unit + C.block_price + num_tiles - 1) // share
        num_parts = last_slot - first_slot + 1
    return num_parts, first_slot


@triton.jit
def part_of(begin, end, worker, share, block, C: tl.constexpr):
    """What units [begin, end) of a block are: tiles [tile, stop), part `part` of `num_parts`.

    first_slot tells the merge tree where the block's parts wait.
    """
    num_rows, first_tile, num_tiles, _ = block
    num_parts, first_slot = parts_of(share, block, C)
    if C.fixed_parts:
        size = part_tiles_of(num_tiles, num_rows, C)
        tile, stop = begin * size, tl.minimum(end * size, num_tiles)
        part = begin
    else:
        tile, stop = tl.maximum(begin - C.block_price, 0), tl.maximum(end - C.block_price, 0)
        part = worker - first_slot
    return first_tile + tile, first_tile + stop, part, num_parts, first_slot


@triton.jit
def pair_of(turn, programs, C: tl.constexpr):
    """The place among the blocks, longest first, and the kv head of a program's turn.

    Turns go through the pairs to and fro: who has the longest of one round has the shortest of the
    next.
    """
    place = tl.where(turn % 2 == 0, programs, C.num_programs - 1 - programs)
    index = turn * C.num_programs + place
    return index // C.num_kv_heads, index % C.num_kv_heads


@triton.jit
def sort_blocks(blocks_ptr, dealt_ptr, counts_ptr, num_blocks, most, CHUNK: tl.constexpr):
    """Copy the records of all blocks, those with most units first: a counting sort.

    Blocks of nearly the same length stand in any order, which decides who attends to them and
    nothing else.
    """
    levels = tl.arange(0, LEVELS)
    tl.store(counts_ptr + levels, 0)
    tl.debug_barrier()
    for start in range(0, num_blocks, CHUNK):
        blocks = start + tl.arange(0, CHUNK)
        inside = blocks < num_blocks
        level = level_of(blocks_ptr, blocks, inside, most)
        tl.atomic_add(counts_ptr + level, 1, inside)
    tl.debug_barrier()
    counts = tl.load(counts_ptr + levels)
    tl.debug_barrier()
    tl.store(counts_ptr + levels, tl.cumsum(counts) - counts)
    tl.debug_barrier()
    for start in range(0, num_blocks, CHUNK):
        blocks = start + tl.arange(0, CHUNK)
        inside = blocks < num_blocks
        level = level_of(blocks_ptr, blocks, inside, most)
        place = tl.atomic_add(counts_ptr + level, 1, inside)
        fields = tl.arange(0, RECORD)[None, :]
        record = tl.load(blocks_ptr + blocks[:, None] * RECORD + fields, inside[:, None])
        tl.store(dealt_ptr + place[:, None] * RECORD + fields, record, inside[:, None])
    tl.debug_barrier()


@triton.jit
def level_of(blocks_ptr, blocks, inside, most):
    """0 for the longest blocks to LEVELS - 1 for the shortest; `most` tiles are the longest."""
    num_tiles = tl.load(blocks_ptr + blocks * RECORD + 6, inside, other=0)
    return (most - num_tiles).to(tl.int64) * (LEVELS - 1) // tl.maximum(most, 1)


@triton.jit
def longest_turns(dealt_ptr, num_blocks, num_rounds, C: tl.constexpr, CHUNK: tl.constexpr):
    """The units of the program that has most of them, if pairs are dealt out whole."""
    longest = 0
    for start in range(0, C.num_programs, CHUNK):
        programs = start + tl.arange(0, CHUNK)
        units = tl.zeros([CHUNK], tl.int32)
        for turn in range(num_rounds):
            place, _ = pair_of(turn, programs, C)
            inside = (programs < C.num_programs) & (place < num_blocks)
            num_tiles = tl.load(dealt_ptr + place * RECORD + 6, inside, other=0)
            units += units_of(num_tiles, 0, C)
        longest = tl.maximum(longest, tl.max(units))
    return longest


@triton.jit
def last_not_above(sorted_ptr, stride, count, values):
    """For each value the last index i < count with sorted[i] <= value; sorted[0] is 0."""
    low = values * 0
    high = low + count
    remaining = count
    while remaining > 1:
        middle = (low + high) // 2
        below = tl.load(sorted_ptr + middle * stride) <= values
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle)
        remaining = (remaining + 1) // 2
    return low


@triton.jit
def query_range(seqs, cu_seqlens_q_ptr, num_seqs, num_tokens):
    """First token and number of tokens; sequence `num_seqs` owns the tokens of nobody."""
    start = tl.load(cu_seqlens_q_ptr + seqs, seqs <= num_seqs, other=0)
    stop = tl.load(cu_seqlens_q_ptr + seqs + 1, seqs < num_seqs, other=num_tokens)
    return start, tl.maximum(tl.minimum(stop, num_tokens) - start, 0)


@triton.jit
def key_range(seqs, seq_lens_ptr, cu_seqlens_k_ptr, num_seqs, max_len):
    """Origin in the storage (a table row, a batch row or a packed row) and number of keys."""
    owned = seqs < num_seqs
    origin = seqs
    length = tl.where(owned, max_len, 0)
    if cu_seqlens_k_ptr is not None:
        origin = tl.minimum(
            tl.maximum(tl.load(cu_seqlens_k_ptr + seqs, owned, other=0), 0), max_len
        )
        end = tl.load(cu_seqlens_k_ptr + seqs + 1, owned, other=0)
        length = tl.minimum(end, max_len) - origin
    if seq_lens_ptr is not None:
        length = tl.load(seq_lens_ptr + seqs, owned, other=0)
    return origin, tl.minimum(tl.maximum(length, 0), max_len)


@triton.jit(do_not_specialize=["max_len", "num_seqs", "num_tokens", "max_blocks", "window"])
def schedule_kernel(
    schedule_ptr,  # header, workers [num_workers, WORKER], blocks [max_blocks, RECORD], sequences
    cu_seqlens_q_ptr,  # [num_seqs + 1]
    seq_lens_ptr,  # [num_seqs] or None
    cu_seqlens_k_ptr,  # [num_seqs + 1] or None
    max_len,
    num_seqs,
    num_tokens,
    max_blocks,
    window,  # or None
    C: tl.constexpr,
    CHUNK: tl.constexpr = 256,
):
    workers_ptr = schedule_ptr + HEADER
    blocks_ptr = workers_ptr + C.num_workers * WORKER
    seqs_ptr = blocks_ptr + max_blocks * (2 if is_dealt(C) else 1) * RECORD
    lanes = tl.arange(0, CHUNK)

    num_blocks = 0  # before each sequence
    for start in range(0, num_seqs + 1, CHUNK):
        seqs = start + lanes
        _, q_len = query_range(seqs, cu_seqlens_q_ptr, num_seqs, num_tokens)
        blocks = tl.where(seqs <= num_seqs, tl.cdiv(q_len * C.group, C.block_m), 0)
        tl.store(seqs_ptr + seqs, num_blocks + tl.cumsum(blocks) - blocks, seqs <= num_seqs)
        num_blocks += tl.sum(blocks)
    num_blocks = tl.minimum(num_blocks, max_blocks)
    tl.debug_barrier()

    num_units = 0  # before each block
    num_empty = 0
    most = 0
    least = 2147483647
    for start in range(0, num_blocks, CHUNK):
        blocks = start + lanes
        inside = blocks < num_blocks
        seqs = last_not_above(seqs_ptr, 1, num_seqs + 1, blocks)
        q_start, q_len = query_range(seqs, cu_seqlens_q_ptr, num_seqs, num_tokens)
        origin, seq_len = key_range(seqs, seq_lens_ptr, cu_seqlens_k_ptr, num_seqs, max_len)
        num_rows = q_len * C.group
        first_row = (blocks - tl.load(seqs_ptr + seqs)) * C.block_m
        last_row = tl.minimum(first_row + C.block_m, num_rows) - 1
        key_start, key_stop = seen_by_any(
            first_row // C.group, last_row // C.group, q_len, seq_len, window, C.causal
        )
        first_tile = key_start // C.block_n
        num_tiles = tl.cdiv(key_stop, C.block_n) - first_tile
        num_tiles = tl.where(key_stop > key_start, num_tiles, 0)
        units = units_of(num_tiles, num_rows, C)
        units = tl.where(inside, units, 0)
        num_empty += tl.sum((inside & (units == 0)).to(tl.int32))
        most = tl.maximum(most, tl.max(units))
        least = tl.minimum(least, tl.min(tl.where(units > 0, units, 2147483647)))
        record = blocks_ptr + blocks * RECORD
        tl.store(record, origin, inside)
        tl.store(record + 1, first_row, inside)
        tl.store(record + 2, q_start, inside)
        tl.store(record + 3, q_len, inside)
        tl.store(record + 4, seq_len, inside)
        tl.store(record + 5, first_tile, inside)
        tl.store(record + 6, num_tiles, inside)
        tl.store(record + 7, num_units + tl.cumsum(units) - units, inside)
        num_units += tl.sum(units)
    tl.debug_barrier()

    # Whole blocks for each worker, if they are of one size and that costs less than merging.
    share = tl.maximum(tl.cdiv(num_units, C.num_workers), 1)
    if most == least:
        whole = tl.cdiv(num_blocks - num_empty, C.num_workers) * most
        share = tl.where(whole <= share + C.merge_price, whole, share)
    share = tl.maximum(share, 1)
    # Many blocks of many rows are dealt out whole, in rounds, over all programs.
    num_rounds = 0
    if is_dealt(C):
        dealt_ptr = blocks_ptr + num_blocks * RECORD
        counts_ptr = seqs_ptr + num_seqs + 1
        sort_blocks(blocks_ptr, dealt_ptr, counts_ptr, num_blocks, most, CHUNK)
        num_rounds = tl.cdiv(num_blocks * C.num_kv_heads, C.num_programs)
        if num_rounds < MANY_ROUNDS:
            longest = longest_turns(dealt_ptr, num_blocks, num_rounds, C, CHUNK)
            num_rounds = tl.where(longest <= share + C.merge_price, num_rounds, 0)
    tl.store(schedule_ptr + 5, num_rounds)
    tl.store(schedule_ptr, share)
    tl.store(schedule_ptr + 1, num_units)
    tl.store(schedule_ptr + 2, num_blocks)
    tl.store(schedule_ptr + 3, num_empty)
    tl.store(schedule_ptr + 4, tl.load(cu_seqlens_q_ptr + num_seqs))
    for start in range(0, C.num_workers, CHUNK):
        workers = start + lanes
        block = last_not_above(blocks_ptr + 7, RECORD, num_blocks, workers * share)
        inside = workers < C.num_workers
        tl.store(workers_ptr + workers * WORKER, block, inside)
        fields = tl.arange(0, RECORD)[None, :]
        record = tl.load(blocks_ptr + block[:, None] * RECORD + fields)
        tl.store(workers_ptr + (workers * WORKER + 8)[:, None] + fields, record, inside[:, None])


def compile_cases(_: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Launches on meta tensors: each kind of lengths, with and without fixed parts."""

    def launch(seq_lens: bool, cu_seqlens: bool, window: int | None, fixed_parts: bool) -> None:
        lengths = torch.empty(9, dtype=torch.int32, device="meta")
        constants = attend_constants(
            AttendConfig(16, 64, num_warps=4, num_stages=3, workers_per_sm=2),
            causal=True,
            group=4,
            num_kv_heads=8,
            page_size=16,
            head_dim_k=128,
            head_dim_v=128,
            num_programs=264,
            fixed_parts=fixed_parts,
        )
        schedule(
            torch.empty(schedule_size(8, 8, constants), dtype=torch.int32, device="meta"),
            lengths,
            lengths[1:] if seq_lens else None,
            lengths if cu_seqlens else None,
            4096,
            8,
            window,
            constants,
        )

    yield "lengths", partial(launch, True, False, None, False)
    yield "lengths, window, fixed parts", partial(launch, True, False, 100, True)
    yield "packed", partial(launch, False, True, None, False)
    yield "whole storage", partial(launch, False, False, None, False)
