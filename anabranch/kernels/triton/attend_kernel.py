"""Attention of any query length over keys of any source: one kernel for all of them.

A program walks its share of the schedule, an item (tiles of a block of query rows, for one kv head)
at a time. A block that one program holds whole is written directly; otherwise each leaves a part,
and parts are merged in a tree: the last program to arrive at a node merges it. No program waits.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from anabranch.kernels.constants import (
    AttendProgram,
    with_codes,
    with_page_strides,
    with_priors,
    with_sinks,
)
from anabranch.kernels.load.arguments import Rows, boxes_of, view_arguments
from anabranch.kernels.load.key_pairs import in_pairs
from anabranch.kernels.load.packed_codes import words_of
from anabranch.kernels.parts.join import merge_groups, merge_tree
from anabranch.kernels.parts.slots import Parts, StateRows, leave_part, write_rows
from anabranch.kernels.schedule.schedule_layout import is_dealt, read_block, read_header
from anabranch.kernels.schedule.walk import Item, Walk, begin_walk, next_item
from anabranch.kernels.softmax.online_softmax import LOG2_E, empty_state, finish_state
from anabranch.kernels.triton.attend_block import Operands, attend_block, attend_parts
from anabranch.kernels.triton.prior_states import prior_arguments, resume
from anabranch.keys import KeyView, ScaleStore
from anabranch.launches.recorder import launch
from anabranch.rules import Rules
from anabranch.state import AttentionState


def attend(
    q: torch.Tensor,  # [num_tokens, num_heads, head_dim_k]
    view: KeyView,
    rules: Rules,
    state: AttentionState,
    schedule: torch.Tensor,
    parts: Parts,
    program: AttendProgram,
    prior: AttentionState | None = None,  # a stack of states, merged into this one
) -> None:
    """Write the state of `q` over the keys, as `schedule` divides the work."""
    constants, table, tree = program.constants, view.page_table, rules.tree_mask
    boxes = boxes_of(view, constants)
    if table is not None:
        constants = with_page_strides(constants, view.k[1:3], view.v[1:3])
    if view.is_quantised:
        itemsize = q.element_size()
        strides = (scale_strides(x.scales) for x in (view.k, view.v))
        words, pairs = words_of(view, itemsize), in_pairs(view, itemsize)
        constants = with_codes(constants, *strides, *words, pairs, list_heads(view))
    if prior is not None:
        constants = with_priors(constants, prior.lse.shape[0])
    if rules.sinks is not None:
        constants = with_sinks(constants)
    launch(
        attend_kernel,
        (constants.division.num_programs,),
        Rows(q, *q.stride()),
        view_arguments(view, constants.source.native_fp8),
        *(boxes or (None, None, None)),
        0 if table is None else table.stride(0),
        rules._replace(
            causal=None,  # a constant
            scale=rules.scale * math.log2(math.e),
            sinks=None if rules.sinks is None else rules.sinks.contiguous(),
            tree_mask=None if tree is None else tree.contiguous().view(torch.uint8),
        ),
        0 if tree is None else tree.shape[1],
        Rows(state.out, *state.out.stride()),
        Rows(state.lse, *state.lse.stride(), 0),
        schedule,
        parts,
        None if prior is None else prior_arguments(prior),
        constants,
        **program.options,
        **({"launch_pdl": True} if constants.overlap else {}),
    )


def scale_strides(scales: ScaleStore | None) -> tuple[int, int, int | None] | None:
    """As constants: of pages, keys and, unless heads lie first, of heads."""
    if scales is None:
        return None
    return scales.page, scales.key, scales.head if scales.head < scales.page else None


def list_heads(view: KeyView) -> tuple[int, int] | None:
    """Lists of a token and the kv heads among which they are divided; None if lists share heads."""
    lists = view.lists
    if lists is None or lists.num_kv_heads == 1:
        return None
    return lists.lists_per_token, lists.num_kv_heads


@triton.jit(do_not_specialize=["table_stride", "tree_width"])
def attend_kernel(
    q,  # Rows [num_tokens, num_heads, head_dim_k]
    view,  # ViewArguments
    k_box,  # Boxes, or None for each: Triton finds descriptors outside of tuples only
    k_rest_box,
    v_box,
    table_stride,
    rules,  # Rules, with the scale of logits in base 2 and a mask of bytes
    tree_width,
    out_rows,  # Rows [num_tokens, num_heads, head_dim_v]
    lse_rows,  # Rows [num_tokens, num_heads, 1]
    schedule_ptr,  # as schedule.py lays it out
    parts,  # Parts
    prior,  # PriorArguments or None
    C: tl.constexpr,  # AttendConstants
):
    """Attend to the items of this program's share of the schedule."""
    if C.overlap:  # nothing is read before the kernel ahead has ended
        gdc_wait()
        if C.leaves_empty:  # there may be nothing to do, and the next kernel can come
            gdc_launch_dependents()
    boxes, results = (k_box, k_rest_box, v_box), StateRows(out_rows, lse_rows, parts)
    given = Operands(q, view, boxes, table_stride, rules, tree_width, prior, results)
    worker = tl.program_id(0) // C.num_kv_heads
    header = read_header(schedule_ptr)
    walk = begin_walk(worker, header.share, schedule_ptr, C)
    has_share = worker < C.division.num_workers
    stop = tl.minimum(walk.unit + header.share, header.num_units)
    stop = tl.where(has_share, stop, walk.unit)
    if is_dealt(C):  # noqa: SIM102 - one is known when compiling, the other is not
        if header.num_rounds > 0:  # units are turns
            walk = Walk(0, walk.index, walk.place, walk.block)
            stop = header.num_rounds
    while walk.unit < stop:
        walk, item = next_item(walk, worker, stop, header, schedule_ptr, C)
        if item.tile < item.stop:
            if C.division.folds_parts:
                out, lse = attend_parts(item, given, C)
            else:
                state, _ = attend_block(item, item.part == 0, given, C)
                out, lse = finish_state(state)
            if item.count == item.num_parts:
                rows = item.block.first_row + tl.arange(0, C.tiles.block_m)
                write_rows(out, lse, rows, item, results, C)
            else:
                if not C.division.folds_parts:
                    leave_part(out, lse, item.part, item, parts, C)
                if C.merging.fused and C.division.folds_parts:
                    merge_groups(item, results, C)
                elif C.merging.fused:
                    merge_tree(item, results, C)

    num_empty = header.num_empty
    if C.leaves_empty:
        num_empty = 0  # known to the compiler
    if num_empty > 0:
        write_empty(worker, header, schedule_ptr, given, C)


@triton.jit
def write_empty(worker, header, schedule_ptr, given, C: tl.constexpr):
    """Write the blocks that see no keys: no worker's share leads there."""
    kv_head = tl.program_id(0) % C.num_kv_heads
    for index in range(worker, header.num_blocks, C.division.num_workers):
        block = read_block(schedule_ptr, index, C)
        if block.num_tiles == 0:
            item = Item(block, kv_head, 0, 0, 0, 1, 1, 0, 0)
            rows = block.first_row + tl.arange(0, C.tiles.block_m)
            num_rows = block.q_len * C.group
            out, lse = finish_state(empty_state(C.tiles.block_m, C.tiles.block_dv))
            if given.rules.sinks is not None:
                heads = kv_head * C.group + rows % C.group
                owned = (rows < num_rows) & (block.q_start < header.orphans)
                sinks = tl.load(given.rules.sinks + heads, owned, other=float("-inf"))
                lse = sinks.to(tl.float32)
            if C.num_priors > 0:
                state = (lse * LOG2_E, tl.where(lse == float("-inf"), 0.0, 1.0), out)
                tokens, heads = block.q_start + rows // C.group, kv_head * C.group + rows % C.group
                state = resume(state, given.prior, tokens, heads, rows < num_rows, C)
                out, lse = finish_state(state)
            write_rows(out, lse, rows, item, given.results, C)
