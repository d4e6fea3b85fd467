"""The end of a part of a block: a running state becomes a state, which waits or is merged.

Fixed parts are merged in groups, and then the groups, both in the order of their keys. A worker
that holds a whole group merges it as its parts end, and one that holds a whole block its groups
too: with the same operations as parts and groups that wait in slots are merged.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from anabranch.kernels.parts.slots import leave_part
from anabranch.kernels.softmax.merge_states import finish_merge, merge_part
from anabranch.kernels.softmax.online_softmax import empty_state


class Fold(NamedTuple):
    """Fixed parts that end inside the loop over tiles: what is merged of those before."""

    merges: Any  # as `keep_part` returns them
    part: Any  # under way
    end: Any  # the tile at which it ends


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
