"""Blocks dealt out whole: sorted by length, and what the busiest program would have of them."""

import triton
import triton.language as tl

from anabranch.kernels.schedule.walk import LEVELS, RECORD, place_in_round, units_of


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
    """0 for the longest blocks, at most LEVELS - 1 for the shortest; none has over `most` tiles."""
    num_tiles = tl.load(blocks_ptr + blocks * RECORD + 6, inside, other=0)
    return (most - num_tiles) // tiles_a_level(most)


@triton.jit
def tiles_a_level(most):
    """How many lengths share a level: one, up to LEVELS of them."""
    return most // LEVELS + 1


@triton.jit
def longest_turns(dealt_ptr, num_blocks, num_rounds, most, C: tl.constexpr, CHUNK: tl.constexpr):
    """The units of the program that has most of them, if blocks are dealt out whole.

    A block counts as the longest of its level, so that the order within a level changes nothing.
    """
    longest = 0
    for start in range(0, C.division.num_programs, CHUNK):
        programs = start + tl.arange(0, CHUNK)
        units = tl.zeros([CHUNK], tl.int32)
        for turn in range(num_rounds):
            place, _ = place_in_round(turn, programs, C)
            inside = (programs < C.division.num_programs) & (place < num_blocks)
            level = level_of(dealt_ptr, place, inside, most)
            num_tiles = most - level * tiles_a_level(most)
            units += tl.where(inside, units_of(num_tiles, 0, C), 0)
        longest = tl.maximum(longest, tl.max(units))
    return longest
