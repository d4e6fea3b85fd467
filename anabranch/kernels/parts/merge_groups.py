"""Fixed parts of one block and kv head, left by several workers, merged in groups.

A group that one worker holds whole was left as one state, in its first part's slot. Of the others
every part was left; the worker that arrives last at such a group merges it into its first part's
slot. The worker that completes the last group merges all groups. So the order and the operations of
the merge depend on the parts alone, and no more is loaded than was left.
"""

import triton
import triton.language as tl

from anabranch.kernels.parts.join import arrive, merge_node


@triton.jit
def merge_groups(item, results, C: tl.constexpr):
    """Arrive with the parts of an item; the worker that is the last of all writes."""
    SIZE: tl.constexpr = C.merging.group_parts
    part, count, num_parts = item.part, item.count, item.num_parts
    num_groups = tl.cdiv(num_parts, SIZE)
    stop = part + count
    # A turn for each group that has held parts, and after them one for the merge of groups.
    turn, top = part // SIZE, (stop - 1) // SIZE + 1
    brought = 0  # groups that wait as one state
    if SIZE == 1:
        turn, brought = top, count
    while turn < top + (num_groups > 1).to(tl.int32):
        is_top = turn == top
        node = tl.where(is_top, 0, turn * SIZE)
        span = tl.where(is_top, SIZE, 1)
        children = tl.where(is_top, num_groups, tl.minimum(num_parts - node, SIZE))
        held = tl.minimum(stop, node + SIZE) - tl.maximum(part, node)
        held = tl.where(is_top, brought, held)
        is_whole = (held == children) & (turn < top)
        brought += is_whole.to(tl.int32)
        if (held > 0) & (is_whole == 0):  # noqa: SIM102 - `and` would arrive in any case
            # a slot of no other group; that of all groups is a group's first
            if arrive(node + span, held, children, item, results.parts, C):
                merge_node(node, span, children, is_top | (num_groups == 1), item, results, C)
                brought += 1
        turn += 1
