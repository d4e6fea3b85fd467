"""Parts of one pair, left by several workers, merged without a second launch and without waiting.

Parts are the leaves of a tree with fan_in children a node. Whoever arrives last at a node merges
its children, in order of their keys, into the first child's slot and goes on to the node above; so
the result does not depend on the order of arrival. A level costs an arrival (about 2 us on an
H200), so nodes are wide, and the parts of a node are loaded many at a time.
"""

import triton
import triton.language as tl

from anabranch.kernels.parts.output import write_rows
from anabranch.kernels.parts.slots import slot_of, store_slot
from anabranch.kernels.softmax.online_softmax import (
    empty_state,
    finish_merge,
    merge_batch,
    merge_part,
)


@triton.jit
def merge_children(
    node, span, children, first_slot, kv_head, rows, num_rows, parts, C: tl.constexpr
):
    """Merge some rows of a node's children. Loads pass by L1: other workers wrote them."""
    state = empty_state(C.merging.rows, C.tiles.block_dv)
    dims = tl.arange(0, C.tiles.block_dv)[None, :]
    BATCH: tl.constexpr = C.merging.batch
    # ptxas loads parts that wait under a condition, or for the weight of the part before, one after
    # the other. Fixed parts are merged one by one everywhere, for the same bits.
    TOGETHER: tl.constexpr = not C.merging.fused and not C.division.fixed_parts
    for first in range(0, children, BATCH):
        outs = ()
        lses = ()
        for i in tl.static_range(BATCH):  # all loads are under way before the first is used
            child = first + i
            present = (rows < num_rows) & (child < children)
            if TOGETHER:  # copies of the last part, and of the last row, weigh nothing
                child = tl.minimum(child, children - 1)
                slot = slot_of(node + child * span, first_slot, kv_head, C)
                places = slot * C.tiles.block_m + tl.minimum(rows, num_rows - 1)
                lse = tl.load(parts.lses + places, cache_modifier=".cg")
                lse = tl.where(present, lse, float("-inf"))
                ptrs = parts.outs + places[:, None] * C.tiles.block_dv + dims
                out = tl.where(present[:, None], tl.load(ptrs, cache_modifier=".cg"), 0.0)
            else:
                slot = slot_of(node + child * span, first_slot, kv_head, C)
                places = slot * C.tiles.block_m + rows
                ptrs = parts.outs + places[:, None] * C.tiles.block_dv + dims
                lse = tl.load(
                    parts.lses + places, present, other=float("-inf"), cache_modifier=".cg"
                )
                out = tl.load(ptrs, present[:, None], other=0.0, cache_modifier=".cg")
            outs = outs + (out,)  # noqa: RUF005 (the kernel language has no unpacking)
            lses = lses + (lse,)  # noqa: RUF005
        if TOGETHER:
            state = merge_batch(state, outs, lses, BATCH)
        else:
            for i in tl.static_range(BATCH):
                state = merge_part(state, outs[i], lses[i])
    return finish_merge(state)


@triton.jit
def arrive(counter_ptr, count, children):
    """Whether a worker with `count` of `children` is the last at a node; it resets the counter."""
    tl.debug_barrier()  # every warp's stores come before the release below
    is_last = tl.atomic_add(counter_ptr, count, sem="acq_rel", scope="gpu") == children - count
    if is_last:
        tl.store(counter_ptr, 0)
    return is_last


@triton.jit
def merge_node(
    node, span, children, is_top, first_slot, first_row, num_rows, q_start, kv_head, parts,
    out_rows, lse_rows, C: tl.constexpr,
):  # fmt: skip
    """Merge a node's children: at the top into the output, else into the first child's slot."""
    left = tl.minimum(num_rows - first_row, C.tiles.block_m)
    for row in range(0, left, C.merging.rows):
        rows = row + tl.arange(0, C.merging.rows)
        out, lse = merge_children(node, span, children, first_slot, kv_head, rows, left, parts, C)
        if is_top:
            rows += first_row
            write_rows(out, lse, rows, num_rows, q_start, kv_head, out_rows, lse_rows, C)
        else:
            tl.debug_barrier()  # the first child's slot has been read
            slot = slot_of(node, first_slot, kv_head, C)
            store_slot(out, lse, slot, rows, left, parts, C)


@triton.jit
def merge_tree(
    part,
    num_parts,
    first_slot,
    first_row,
    num_rows,
    q_start,
    kv_head,
    parts,
    out_rows,
    lse_rows,
    C: tl.constexpr,
):
    """Climb from `part` as long as this worker is the last to arrive; at the top, write."""
    node = part  # the first part below the node reached
    span = 1  # parts below a child
    while span < num_parts:
        node = node // (span * C.merging.fan_in) * (span * C.merging.fan_in)
        children = tl.minimum(tl.cdiv(num_parts - node, span), C.merging.fan_in)
        climbs = children == 1
        if children > 1:
            # node + span tells a node from all others: fan_in divides it as often as it does span
            counter = parts.counters + slot_of(node + span, first_slot, kv_head, C)
            climbs = arrive(counter, 1, children)
            if climbs:
                is_top = span * C.merging.fan_in >= num_parts
                merge_node(
                    node, span, children, is_top, first_slot, first_row, num_rows, q_start, kv_head,
                    parts, out_rows, lse_rows, C,
                )  # fmt: skip
        span = tl.where(climbs, span * C.merging.fan_in, num_parts)
