"""Into how many parts blocks are cut on Hopper: what ends first, or what their lengths say."""

import triton
import triton.language as tl

from anabranch.kernels import hopper_config
from anabranch.kernels.hopper_config import PackFacts
from anabranch.kernels.schedule.items import ITEM

BLOCK_M: tl.constexpr = tl.constexpr(hopper_config.BLOCK_ROWS)
TILE_PRICE: tl.constexpr = tl.constexpr(hopper_config.TILE_PRICE)
MERGE_BATCH: tl.constexpr = tl.constexpr(hopper_config.MERGE_BATCH)
MOST_FIXED_PARTS: tl.constexpr = tl.constexpr(hopper_config.MOST_FIXED_PARTS)
MAX_CUTS: tl.constexpr = tl.constexpr(64)  # parts of the longest block
FIXED_TILES: tl.constexpr = tl.constexpr(8)  # of a part cut at fixed boundaries, at most, unless
# its block would have more than `most_fixed_parts` of HopperConstants
WHOLE_ROWS: tl.constexpr = tl.constexpr(512)  # there, sequences of so many rows are not cut


@triton.jit
def whole_facts(packs):
    """The facts as the integers that they are."""
    return PackFacts(
        tl.cast(packs.num_packs, tl.int32),
        tl.cast(packs.packs_per_kv, tl.int32),
        tl.cast(packs.bytes_a_key, tl.int32),
        tl.cast(packs.item_price, tl.int32),
        tl.cast(packs.merge_price, tl.int32),
        tl.cast(packs.part_price, tl.int32),
        tl.cast(packs.batch_price, tl.int32),
    )


@triton.jit
def num_parts_of(num_tiles, num_rows, limit, packs, C: tl.constexpr):
    """Into how many parts a block is cut: of `limit` tiles at most, or as its own length says."""
    if C.splits and C.fixed_parts:
        most = tl.minimum(tl.maximum(C.num_programs // packs.num_packs, 1), MOST_FIXED_PARTS)
        limit = tl.maximum(tl.cdiv(num_tiles, most), FIXED_TILES)
        limit = tl.where(num_rows >= WHOLE_ROWS, num_tiles, limit)
    return tl.cdiv(num_tiles, limit)


@triton.jit
def choose_limit(blocks_ptr, num_blocks, most, total, slots, packs, C: tl.constexpr):
    """The most tiles of a part: what ends first.

    Column c of a tile is the choice of cutting the longest block into c + 1 parts. Items are taken
    longest first, so programs end together unless those of more than half the limit, of which none
    fits beside another, make one round more. That is 1.04 times what the best choice takes in 19 of
    20 calls, if items take what they are said to.
    """
    cuts = tl.arange(0, MAX_CUTS) + 1
    limits = tl.cdiv(most, cuts)
    num_items = tl.zeros([MAX_CUTS], tl.int32)
    num_parts = tl.zeros([MAX_CUTS], tl.int32)
    part_rows = tl.zeros([MAX_CUTS], tl.int32)
    num_long = tl.zeros([MAX_CUTS], tl.int32)
    long_tiles = tl.zeros([MAX_CUTS], tl.int32)
    for start in range(0, num_blocks, 32):
        blocks = start + tl.arange(0, 32)
        inside = blocks < num_blocks
        num_tiles = tl.load(blocks_ptr + blocks * ITEM + 6, inside, other=0)
        num_rows = rows_of_block(blocks_ptr + blocks * ITEM, inside, C)
        parts = tl.cdiv(num_tiles[:, None], limits[None, :])
        sizes = tl.cdiv(num_tiles[:, None], tl.maximum(parts, 1))
        of_long = tl.where(2 * sizes > limits[None, :], parts, 0)
        num_items += tl.sum(parts, 0)
        num_long += tl.sum(of_long, 0)
        long_tiles += tl.sum(of_long * sizes, 0)
        parts = tl.where(parts > 1, parts, 0)
        num_parts += tl.sum(parts, 0)
        part_rows += tl.sum(parts * num_rows[:, None], 0)
    work = (total * TILE_PRICE + num_items * packs.item_price).to(tl.float32)
    evenly = (work * (packs.num_packs / C.num_programs)).to(tl.int32)
    rounds = tl.cdiv(num_long * packs.num_packs, C.num_programs)
    by_rounds = rounds * (long_tiles * TILE_PRICE // tl.maximum(num_long, 1) + packs.item_price)
    time = tl.maximum(limits * TILE_PRICE + packs.item_price, tl.maximum(evenly, by_rounds))
    written = tl.cdiv(part_rows * packs.num_packs, C.num_programs) * packs.part_price // BLOCK_M
    batches = tl.cdiv(tl.cdiv(most, limits), MERGE_BATCH)
    time += tl.where(cuts > 1, packs.merge_price + written + (batches - 1) * packs.batch_price, 0)
    time = tl.where((num_parts <= slots) | (cuts == 1), time, 2147483647)
    return tl.cdiv(most, tl.argmin(time, 0) + 1)


@triton.jit
def rows_of_block(block_ptrs, inside, C: tl.constexpr):
    """Rows of tokens in a block."""
    first_row = tl.load(block_ptrs + 1, inside, other=0)
    num_rows = tl.load(block_ptrs + 3, inside, other=0) * C.pack
    return tl.minimum(num_rows - first_row, BLOCK_M)
