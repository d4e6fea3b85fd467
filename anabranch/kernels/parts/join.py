"""The merge of parts that wait in slots: the same law for a tree, for groups and for a launch."""

import triton
import triton.language as tl

from anabranch.kernels.parts.slots import rows_left, slot_of, slot_rows, store_slot, write_rows
from anabranch.kernels.softmax.merge_states import finish_merge, merge_batch, merge_part
from anabranch.kernels.softmax.online_softmax import empty_state


@triton.jit
def merge_slots(
    state,  # of no parts, for some rows and columns
    rows,  # of the block,
    num_rows,  # those from here on belong to no token
    columns,
    parts_of_node,  # first part, parts from child to child, children
    item,  # with first_slot and kv_head
    parts,  # Parts
    ROWS_OF: tl.constexpr,  # where rows of a part wait
    WIDTH: tl.constexpr,
    BATCH: tl.constexpr,
    C: tl.constexpr,
    AT_ONCE: tl.constexpr = False,
):
    """Merge rows of parts in the order of their keys. Loads pass by L1: other workers wrote them.

    All loads of a batch are under way before the first is used. Parts are merged one by one, as a
    fold of parts in registers is, or a batch AT_ONCE where nothing folds them. There, copies of the
    last part, and of the last row, are loaded and weigh nothing: ptxas loads parts that wait under
    a condition, or for the weight of the part before, one after the other.
    """
    node, span, children = parts_of_node
    for first in range(0, children, BATCH):
        outs = ()
        lses = ()
        for i in tl.static_range(BATCH):
            present = (rows < num_rows) & (first + i < children)
            if AT_ONCE:
                child = tl.minimum(first + i, children - 1)
                places = ROWS_OF(node + child * span, tl.minimum(rows, num_rows - 1), item, C)
                lse = tl.load(parts.lses + places, cache_modifier=".cg")
                lse = tl.where(present, lse, float("-inf"))
                ptrs = parts.outs + places[:, None] * WIDTH + columns
                out = tl.where(present[:, None], tl.load(ptrs, cache_modifier=".cg"), 0.0)
            else:
                places = ROWS_OF(node + (first + i) * span, rows, item, C)
                ptrs = parts.outs + places[:, None] * WIDTH + columns
                lse = tl.load(
                    parts.lses + places, present, other=float("-inf"), cache_modifier=".cg"
                )
                out = tl.load(ptrs, present[:, None], other=0.0, cache_modifier=".cg")
            outs = outs + (out,)  # noqa: RUF005 (the kernel language has no unpacking)
            lses = lses + (lse,)  # noqa: RUF005
        if AT_ONCE:
            state = merge_batch(state, outs, lses, BATCH)
        else:
            for i in tl.static_range(BATCH):
                state = merge_part(state, outs[i], lses[i])
    return finish_merge(state)


@triton.jit
def merge_children(node, span, children, rows, num_rows, item, parts, C: tl.constexpr):
    """Merge some rows of a node's children. Fixed parts are merged one by one, for equal bits."""
    state = empty_state(C.merging.rows, C.tiles.block_dv)
    columns = tl.arange(0, C.tiles.block_dv)[None, :]
    WIDTH: tl.constexpr = C.tiles.block_dv
    BATCH: tl.constexpr = C.merging.batch
    AT_ONCE: tl.constexpr = not (C.merging.fused or C.division.fixed_parts)
    of_node = (node, span, children)
    return merge_slots(
        state, rows, num_rows, columns, of_node, item, parts, slot_rows, WIDTH, BATCH, C, AT_ONCE
    )


@triton.jit
def merge_node(node, span, children, is_top, item, results, C: tl.constexpr):
    """Merge a node's children: at the top into the output, else into the first child's slot."""
    left = tl.minimum(rows_left(item.block, C), C.tiles.block_m)
    for row in range(0, left, C.merging.rows):
        rows = row + tl.arange(0, C.merging.rows)
        out, lse = merge_children(node, span, children, rows, left, item, results.parts, C)
        if is_top:
            write_rows(out, lse, rows + item.block.first_row, item, results, C)
        else:
            tl.debug_barrier()  # the first child's slot has been read
            store_slot(out, lse, node, rows, left, item, results.parts, C)


@triton.jit
def arrive(node, count, children, item, parts, C: tl.constexpr):
    """Whether a worker with `count` of `children` is the last at a node; it resets the counter."""
    counter = parts.counters + slot_of(node, item.first_slot, item.kv_head, C)
    tl.debug_barrier()  # every warp's stores come before the release below
    is_last = tl.atomic_add(counter, count, sem="acq_rel", scope="gpu") == children - count
    if is_last:
        tl.store(counter, 0)
    return is_last


@triton.jit
def merge_tree(item, results, C: tl.constexpr):
    """Climb from the item's part while this worker is the last to arrive; at the top, write.

    Parts are the leaves of a tree with fan_in children a node. The worker that arrives last at a
    node merges its children, in the order of their keys, into the first child's slot and goes on to
    the node above: there is no second launch, nobody waits, and the result does not depend on the
    order of arrival. A level costs an arrival (about 2 us on an H200), so nodes are wide, and the
    parts of a node are loaded many at a time.
    """
    num_parts = item.num_parts
    node = item.part  # the first part below the node reached
    span = 1  # parts below a child
    while span < num_parts:
        node = node // (span * C.merging.fan_in) * (span * C.merging.fan_in)
        children = tl.minimum(tl.cdiv(num_parts - node, span), C.merging.fan_in)
        climbs = children == 1
        if children > 1:
            # node + span tells a node from all others: fan_in divides it as often as it does span
            climbs = arrive(node + span, 1, children, item, results.parts, C)
            if climbs:
                is_top = span * C.merging.fan_in >= num_parts
                merge_node(node, span, children, is_top, item, results, C)
        span = tl.where(climbs, span * C.merging.fan_in, num_parts)


@triton.jit
def merge_groups(item, results, C: tl.constexpr):
    """Arrive with the fixed parts of an item; the worker that is the last of all writes.

    A group that one worker holds whole was left as one state, in its first part's slot. Of the
    others every part was left; the worker that arrives last at such a group merges it into its
    first part's slot. The worker that completes the last group merges all groups. So the order and
    the operations of the merge depend on the parts alone, and no more is loaded than was left.
    """
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
