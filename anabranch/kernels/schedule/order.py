"""The order of work on a Hopper GPU: which rows attend to which keys, longest first.

Queries are cut into blocks of BLOCK_M rows (token, head of a pack), keys into tiles. An *item* is a
block with a range of its tiles: all of them, or one part where whole blocks would leave processors
idle. Items stand in device memory sorted by length; programs take (item, pack of heads) from a
counter, so the longest begin first and the short ones fill the gaps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from anabranch.call import AttendCall
from anabranch.kernels import hopper_config
from anabranch.kernels.hopper_config import HopperConstants
from anabranch.kernels.schedule.choose_cuts import (
    BLOCK_M,
    FIXED_TILES,
    WHOLE_ROWS,
    choose_limit,
    num_parts_of,
    whole_facts,
)
from anabranch.kernels.schedule.cut_blocks import (
    SIZES,
    Lengths,
    clear,
    cut_blocks,
    key_range,
    query_range,
    store_blocks,
)
from anabranch.kernels.schedule.items import CUT, HEADER, ITEM, section_of
from anabranch.launches.recorder import launch

CUT_KEYS = 1024  # of a sequence
LEVELS: tl.constexpr = tl.constexpr(1024)  # lengths that the sort tells apart


def num_blocks_bound(num_seqs: int, num_tokens: int, constants: HopperConstants) -> int:
    """Blocks there can be: every sequence, and the orphan tokens, may end in a short one."""
    return triton.cdiv(num_tokens * constants.pack, BLOCK_M.value) + num_seqs + 1


def may_split(
    num_seqs: int, num_tokens: int, num_packs: int, pack: int, programs: int, causal: bool
) -> bool:
    """Whether cutting blocks can pay: not where there are many, or enough of one sequence.

    Without an order of keys the code for it is the faster one though nothing is cut: of the other,
    ptxas computes the weights of a thread's two rows one after the other, not side by side. 2 x
    4096 tokens, 32/8 heads of 128, take 857 us and 940.
    """
    pairs = triton.cdiv(num_tokens * pack, BLOCK_M.value) * num_packs
    return not causal or pairs < (1.5 if num_seqs == 1 else 4) * programs


def num_slots(num_seqs: int, num_tokens: int, capacity: int, constants: HopperConstants) -> int:
    """Slots for parts that wait for their merge, each BLOCK_M rows of all packs."""
    if not has_parts(capacity, constants):
        return 0
    if not constants.fixed_parts:
        parts = hopper_config.PARTS_A_PROGRAM * constants.num_programs
        return max(parts // constants.num_packs, 2)
    blocks = num_blocks_bound(num_seqs, num_tokens, constants)
    short = min(blocks, num_seqs * triton.cdiv(WHOLE_ROWS.value, BLOCK_M.value))
    parts = triton.cdiv(capacity, FIXED_TILES.value * constants.block_n)
    return short * min(parts, constants.most_fixed_parts)


def has_parts(capacity: int, constants: HopperConstants) -> bool:
    """Whether any block can be cut: what cutting fewer keys could save, the merge takes."""
    least = FIXED_TILES.value * constants.block_n + 1
    return constants.splits and capacity >= (least if constants.fixed_parts else CUT_KEYS)


def most_cut(slots: int) -> int:
    """Blocks that can be cut: each has two parts at least."""
    return slots // 2


def cut_ints(slots: int) -> int:
    """Integers of the blocks that are cut, at the end of the buffer, with one of no parts."""
    return (most_cut(slots) + 1) * CUT.value


def order_size(num_seqs: int, num_tokens: int, slots: int, constants: HopperConstants) -> int:
    """Integers in the buffer: header, items, blocks, sequences, counts, cut blocks."""
    blocks = num_blocks_bound(num_seqs, num_tokens, constants)
    ints = HEADER.value + (2 * blocks + slots) * ITEM.value + num_seqs + 1 + LEVELS.value
    return ints + cut_ints(slots)


def order(
    buffer: torch.Tensor,  # int32 [order_size(...)]
    counters: torch.Tensor,  # int32, of items and of parts that arrive; made 0
    call: AttendCall,
    slots: int,
    constants: HopperConstants,
) -> None:
    """Fill `buffer` from lengths that stay on the device."""
    queries, keys = call.queries, call.keys
    num_tokens, num_seqs = queries.packed.shape[0], keys.num_seqs
    launch(
        order_kernel,
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
        slots,
        call.rules.window,
        hopper_config.pack_facts(constants),
        hopper_config.order_constants(constants),
        num_warps=8,
    )


class ItemSizes(NamedTuple):
    """Tiles of items."""

    limit: Any  # of cut blocks
    longest: Any  # that any item has


@triton.jit
def level_of(num_tiles, most):
    """0 for the longest items, at most LEVELS - 1 for the shortest."""
    return (most - num_tiles) // (most // LEVELS + 1)


@triton.jit(do_not_specialize=[*SIZES, "slots"])
def order_kernel(
    order_ptr,  # header, items, blocks, first block of each sequence, counts, cut blocks
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
    slots,
    window,  # or None
    packs,  # PackFacts
    C: tl.constexpr,  # OrderConstants
    CHUNK: tl.constexpr = 256,
):
    packs = whole_facts(packs)
    lengths = Lengths(
        cu_seqlens_q_ptr,
        seq_lens_ptr,
        cu_seqlens_k_ptr,
        q_len_of_all,
        max_len,
        num_seqs,
        num_tokens,
    )
    items_ptr = order_ptr + HEADER
    blocks_ptr = items_ptr + (max_blocks + slots) * ITEM
    seqs_ptr = blocks_ptr + max_blocks * ITEM
    counts_ptr = seqs_ptr + num_seqs + 1
    cut_ptr = counts_ptr + LEVELS
    lanes = tl.arange(0, CHUNK)
    clear(counters_ptr, num_counters)
    clear(cut_ptr, (slots // 2 + 1) * CUT)

    num_blocks = 0  # before each sequence
    num_keys = 0.0  # that several blocks read
    for start in range(0, num_seqs + 1, CHUNK):
        seqs = start + lanes
        _, q_len = query_range(seqs, lengths)
        _, seq_len = key_range(seqs, lengths)
        blocks = tl.where(seqs <= num_seqs, tl.cdiv(q_len * C.pack, BLOCK_M), 0)
        # Only blocks that share a sequence read the same keys.
        num_keys += tl.sum(tl.where(blocks > 1, seq_len, 0).to(tl.float32))
        tl.store(seqs_ptr + seqs, num_blocks + tl.cumsum(blocks) - blocks, seqs <= num_seqs)
        num_blocks += tl.sum(blocks)
    num_blocks = tl.minimum(num_blocks, max_blocks)
    tl.debug_barrier()

    total = 0  # tiles
    most = 1
    for start in range(0, num_blocks, CHUNK):
        blocks = start + lanes
        inside = blocks < num_blocks
        block, _ = cut_blocks(
            blocks, seqs_ptr, lengths, window, C.pack, BLOCK_M, C.block_n, C.causal
        )
        # A block that sees no keys has one tile too, all of it masked: no second way to write.
        num_tiles = tl.maximum(block.num_tiles, 1)
        num_tiles = tl.where(inside, num_tiles, 0)
        total += tl.sum(num_tiles)
        most = tl.maximum(most, tl.max(num_tiles))
        store_blocks(blocks_ptr + blocks * ITEM, block, num_tiles, inside)
    tl.debug_barrier()

    limit = most
    if C.splits and not C.fixed_parts:
        limit = choose_limit(blocks_ptr, num_blocks, most, total, slots, packs, C)
    sizes = ItemSizes(limit, tl.minimum(limit, most))
    num_items = count_levels(blocks_ptr, counts_ptr, num_blocks, sizes, packs, C, CHUNK)
    write_items(items_ptr, blocks_ptr, counts_ptr, cut_ptr, num_blocks, sizes, packs, C, CHUNK)
    tl.store(order_ptr, num_items)
    tl.store(order_ptr + 1, section_of(num_keys, packs, C))
    orphans, _ = query_range(num_seqs, lengths)
    tl.store(order_ptr + 2, orphans)


@triton.jit
def count_levels(
    blocks_ptr, counts_ptr, num_blocks, sizes, packs, C: tl.constexpr, CHUNK: tl.constexpr
):
    """Where the items of each level begin, and how many items there are."""
    levels = tl.arange(0, LEVELS)
    tl.store(counts_ptr + levels, 0)
    tl.debug_barrier()
    num_items = 0
    for start in range(0, num_blocks, CHUNK):
        blocks = start + tl.arange(0, CHUNK)
        inside = blocks < num_blocks
        num_tiles = tl.load(blocks_ptr + blocks * ITEM + 6, inside, other=1)
        num_rows = tl.load(blocks_ptr + blocks * ITEM + 3, inside, other=0) * C.pack
        parts = num_parts_of(num_tiles, num_rows, sizes.limit, packs, C)
        size = tl.cdiv(num_tiles, parts)
        tl.atomic_add(counts_ptr + level_of(size, sizes.longest), parts, inside)
        num_items += tl.sum(tl.where(inside, parts, 0))
    tl.debug_barrier()
    counts = tl.load(counts_ptr + levels)
    tl.debug_barrier()
    tl.store(counts_ptr + levels, tl.cumsum(counts) - counts)
    tl.debug_barrier()
    return num_items


@triton.jit
def write_items(
    items_ptr,
    blocks_ptr,
    counts_ptr,
    cut_ptr,
    num_blocks,
    sizes,
    packs,
    C: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write the parts of all blocks, the longest first, and the blocks that are cut."""
    first_slot = 0
    num_cut = 0  # blocks
    for start in range(0, num_blocks, CHUNK):
        blocks = start + tl.arange(0, CHUNK)
        inside = blocks < num_blocks
        block = blocks_ptr + blocks * ITEM
        first_tile = tl.load(block + 5, inside, other=0)
        num_tiles = tl.load(block + 6, inside, other=1)
        num_rows = tl.load(block + 3, inside, other=0) * C.pack
        parts = num_parts_of(num_tiles, num_rows, sizes.limit, packs, C)
        size = tl.cdiv(num_tiles, parts)
        taken = tl.where(inside & (parts > 1), parts, 0)
        slot = first_slot + tl.cumsum(taken) - taken
        first_slot += tl.sum(taken)
        place = tl.atomic_add(counts_ptr + level_of(size, sizes.longest), parts, inside)
        cut = tl.where(taken > 0, 1, 0)
        record = cut_ptr + (num_cut + tl.cumsum(cut) - cut) * CUT
        for field in tl.static_range(3):  # first_row, q_start, q_len
            tl.store(record + field, tl.load(block + 1 + field, taken > 0), taken > 0)
        tl.store(record + 3, parts, taken > 0)
        tl.store(record + 4, slot, taken > 0)
        num_cut += tl.sum(cut)
        most_parts = tl.max(tl.where(inside, parts, 0))
        for part in range(0, most_parts):
            kept = inside & (part < parts)
            item = items_ptr + (place + part) * ITEM
            for field in tl.static_range(5):
                tl.store(item + field, tl.load(block + field, kept), kept)
            tl.store(item + 5, first_tile + part * size, kept)
            tl.store(item + 6, tl.minimum(size, num_tiles - part * size), kept)
            tl.store(item + 7, part, kept)
            tl.store(item + 8, parts, kept)
            tl.store(item + 9, slot, kept)
