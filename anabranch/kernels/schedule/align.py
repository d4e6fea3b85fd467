"""Shares that begin where blocks do: a worker then leaves one part at most, not two."""

import triton
import triton.language as tl

from anabranch.kernels.schedule.walk import RECORD

LEAST_GROWTH: tl.constexpr = tl.constexpr(2)  # units: what a second block and part cost a worker


@triton.jit
def tiles_of_blocks(blocks_ptr, num_blocks, CHUNK: tl.constexpr):
    """The tiles of the first CHUNK blocks, 0 after the last."""
    blocks = tl.arange(0, CHUNK)
    return tl.load(blocks_ptr + blocks * RECORD + 6, blocks < num_blocks, other=0)


@triton.jit
def aligned_share(blocks_ptr, num_blocks, share, C: tl.constexpr, CHUNK: tl.constexpr):
    """The least share with which every worker stays in one block; 0 if it would grow too much."""
    num_tiles = tiles_of_blocks(blocks_ptr, num_blocks, CHUNK)
    most = share + tl.maximum(share * C.division.aligned_growth // 100, LEAST_GROWTH)
    if tl.sum((num_tiles > 0).to(tl.int32)) > C.division.num_workers:
        most = 0  # no share is large enough
    step = tl.maximum(share // 64, 1)
    even = tl.cdiv(tl.sum(num_tiles), C.division.num_workers)
    # The price of the next block must not reach into the share before: a worker would begin there.
    least: tl.constexpr = max(C.division.least_share, C.division.block_price + 1)
    aligned = tl.maximum(even, least)
    needed = tl.sum(tl.cdiv(num_tiles, aligned))
    while (needed > C.division.num_workers) & (aligned + step <= most):
        aligned += step
        needed = tl.sum(tl.cdiv(num_tiles, aligned))
    fits = (needed <= C.division.num_workers) & (num_blocks <= CHUNK)
    return tl.where(fits, aligned, 0)


@triton.jit
def align_blocks(blocks_ptr, num_blocks, share, C: tl.constexpr, CHUNK: tl.constexpr):
    """Move every block so that its first tile begins a share; the number of units up to the last.

    The price of beginning a block lies in the share before, where it leads to no tile.
    """
    blocks = tl.arange(0, CHUNK)
    num_tiles = tiles_of_blocks(blocks_ptr, num_blocks, CHUNK)
    shares = tl.cdiv(num_tiles, share)
    first_tile = (tl.cumsum(shares) - shares) * share
    tl.store(
        blocks_ptr + blocks * RECORD + 7, first_tile - C.division.block_price, blocks < num_blocks
    )
    tl.debug_barrier()
    return tl.max(tl.where(num_tiles > 0, first_tile + num_tiles, 0))
