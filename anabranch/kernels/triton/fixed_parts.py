"""The end of a part of a block: a running state becomes a state, which waits or is merged.

Fixed parts are merged in groups, and then the groups, both in the order of their keys. A worker
that holds a whole group merges it as its parts end, and one that holds a whole block its groups
too: with the same operations as parts and groups that wait in slots are merged.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton import constexpr_function

from anabranch.kernels.config import FEW_SUMS
from anabranch.kernels.constants import AttendConstants
from anabranch.kernels.load.key_pairs import permute_sums, restore_sums
from anabranch.kernels.parts.slots import leave_part
from anabranch.kernels.softmax.online_softmax import (
    empty_state,
    finish_merge,
    finish_state,
    merge_part,
    spread_total,
)
from anabranch.kernels.triton.prior_states import resume


class Fold(NamedTuple):
    """Fixed parts that end inside the loop over tiles: what is merged of those before."""

    merges: Any  # as `keep_part` returns them
    part: Any  # under way
    end: Any  # the tile at which it ends


@constexpr_function
def closes_inside(constants: AttendConstants) -> bool:
    """Whether fixed parts end inside one loop over all tiles of them, so that copies stay ahead.

    More sums, those of the parts before beside them, leave no room in registers and shared memory.
    """
    sums = constants.tiles.block_m * constants.tiles.block_dv
    return constants.division.folds_parts and sums <= FEW_SUMS


@triton.jit
def transpose_state(state, C: tl.constexpr):
    """A state as the loop over tiles has it: with keys_first acc is transposed, total a tile.

    With a lazy peak, total is spread over threads.
    """
    peak, total, acc = state
    if C.tiles.keys_first:
        first_key = tl.arange(0, C.tiles.block_n)[:, None] == 0
        total = tl.where(first_key, total[None, :], 0.0)
        if C.source.pairs:
            acc = permute_sums(acc)
        acc = tl.trans(acc)
    if C.tiles.lazy_peak:
        total = spread_total(total)
    return peak, total, acc


@triton.jit
def collect_state(state, queries, is_first, given, C: tl.constexpr):
    """A state as it was before `transpose_state`, with what is left to the end of a part.

    The one scale of codes is multiplied into the sum over all tiles; prior states, which the first
    part of a block goes on from, have none.
    """
    peak, total, acc = state
    if C.source.scales_sums:
        acc = acc * tl.load(given.view.v.scales.ptr)
    if C.tiles.keys_first:
        total = tl.sum(total, 0)
        acc = tl.trans(acc)
        if C.source.pairs:
            acc = restore_sums(acc)
    if C.tiles.lazy_peak:
        total = tl.sum(tl.sum(total, 2), 1)
    state = (peak, total, acc)
    if C.num_priors > 0 and C.source.scales_sums:
        mask = queries.inside & is_first
        state = resume(state, given.prior, queries.places, queries.heads, mask, C)
    return state


@triton.jit
def close_part(state, fold, queries, item, given, C: tl.constexpr):
    """Leave or merge a part whose last tile was attended to; what the next part begins with."""
    state = collect_state(state, queries, fold.part == 0, given, C)
    out, lse = finish_state(state)
    merges = keep_part(fold.merges, out, lse, fold.part, item, given.results.parts, C)
    state = transpose_state(empty_state(C.tiles.block_m, C.tiles.block_dv), C)
    return state, Fold(merges, fold.part + 1, fold.end + item.part_tiles)


@triton.jit
def empty_merges(C: tl.constexpr):
    """What `keep_part` takes before the first part: merges of no groups, and of no parts."""
    merged = empty_state(C.tiles.block_m, C.tiles.block_dv)
    group = ()
    if C.merging.group_parts > 1:
        group = empty_state(C.tiles.block_m, C.tiles.block_dv)
    return merged, group


@triton.jit
def keep_part(merges, out, lse, part, item, parts, C: tl.constexpr):
    """Merge a part into its group, and the group into the block, if their worker holds these.

    What is not held whole is left: the parts of a group that is shared, the groups of a block.
    """
    merged, group = merges
    first, count, num_parts = item.part, item.count, item.num_parts
    SIZE: tl.constexpr = C.merging.group_parts
    place = part
    is_complete = True
    if SIZE > 1:
        start = part // SIZE * SIZE
        end = tl.minimum(start + SIZE, num_parts)
        is_held = (start >= first) & (end <= first + count)
        is_complete = (is_held == 0) | (part + 1 == end)
        if is_held:
            group = merge_part(group, out, lse)
            place = start
            if is_complete:
                out, lse = finish_merge(group)
                group = empty_state(C.tiles.block_m, C.tiles.block_dv)
    if is_complete:
        if count == num_parts:
            merged = merge_part(merged, out, lse)
        else:
            leave_part(out, lse, place, item, parts, C)
    return merged, group


@triton.jit
def keep_last(merges, out, lse, part, item, parts, C: tl.constexpr):
    """`keep_part` of the last part that a worker holds; the block's state, if it holds the block.

    A merge of one state is that state, so blocks of one part and of one group leave such merges
    out.
    """
    SIZE: tl.constexpr = C.merging.group_parts
    if (item.count == item.num_parts) & (item.num_parts <= SIZE):
        if SIZE > 1:  # noqa: SIM102 - one is known when compiling, the other is not
            if item.num_parts > 1:
                out, lse = finish_merge(merge_part(merges[1], out, lse))
    else:
        merges = keep_part(merges, out, lse, part, item, parts, C)
        if item.count == item.num_parts:
            out, lse = finish_merge(merges[0])
    return out, lse
