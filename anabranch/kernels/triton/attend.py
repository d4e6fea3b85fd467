"""The producer "triton": attention of any query length over keys of any source, in one kernel.

It runs on any GPU and in the interpreter. A program walks its share of the schedule, an item (tiles
of a block of query rows, for one kv head) at a time. A block that one program holds whole is
written directly; otherwise each leaves a part, and parts are merged in a tree: the last program to
arrive at a node merges it. No program waits.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from anabranch.call import AttendCall, PlanOptions, new_state
from anabranch.kernels import versions
from anabranch.kernels.load.arguments import Rows, boxes_of, view_arguments
from anabranch.kernels.load.key_pairs import in_pairs
from anabranch.kernels.load.packed_codes import words_of
from anabranch.kernels.parts.join import merge_groups, merge_tree
from anabranch.kernels.parts.merge_parts import merge_parts
from anabranch.kernels.parts.slots import Parts, StateRows, leave_part, write_rows
from anabranch.kernels.programs import AttendProgram, StoredCodes, for_call
from anabranch.kernels.schedule.walk import (
    Item,
    Walk,
    begin_walk,
    next_item,
    read_block,
    read_header,
)
from anabranch.kernels.softmax.merge_states import finish_merge
from anabranch.kernels.softmax.online_softmax import LOG2_E, empty_state, finish_state
from anabranch.kernels.triton.attend_lists import attend_lists, check_width
from anabranch.kernels.triton.fixed_parts import empty_merges, keep_last, keep_part
from anabranch.kernels.triton.list_pages import list_pages
from anabranch.kernels.triton.plan import TritonLayout, fill_plan, lay_out
from anabranch.kernels.triton.prior_states import prior_arguments, resume
from anabranch.kernels.triton.runtime import device_refusal
from anabranch.kernels.triton.tile_loop import Operands, attend_block
from anabranch.keys import KeyView, ScaleStore
from anabranch.launches.recorder import launch
from anabranch.rules import Rules
from anabranch.state import AttentionState

__all__ = ["attend", "fill_plan", "lay_out", "prefers", "refusal"]
RESUMES = True
MAX_HEAD_DIMS = {"q": 576, "k": 576, "v": 512}  # of the largest tiles


def refusal(call: AttendCall, options: PlanOptions) -> str | None:
    """Why a call cannot run here; None if it can."""
    del options
    q, keys, view = call.queries.packed, call.keys, call.view
    for name, dim, stride in (
        ("q", q.shape[2], q.stride(2)),
        ("k", keys.head_dim_k, view.k.dim),
        ("v", keys.head_dim_v, view.v.dim),
    ):
        most = MAX_HEAD_DIMS[name]
        if dim > most:
            return f"{name} must have a head dim from 1 to {most}, got {dim}"
        if (dim - 1) * stride >= 1 << 31:
            return f"{name} spreads a head over 2^31 elements, its last stride is {stride}"
    return device_refusal(q.device)


def prefers(call: AttendCall, options: PlanOptions) -> bool:
    """Every call that it can run."""
    del call, options
    return True


def attend(
    call: AttendCall, layout: TritonLayout, room: torch.Tensor, out: AttentionState | None
) -> AttentionState:
    """The state of a call, in `out` if that is given, over the keys of prior states too."""
    q, rules, view, prior = call.queries.packed, call.rules, call.view, call.prior
    state = new_state(call) if out is None else out
    if not q.shape[0]:
        return state
    plan = layout.open(room)
    program = plan.program
    if program.constants.leaves_empty and out is None:
        state.out.zero_()
        state.lse.fill_(float("-inf"))
    if program.constants.division.uniform:
        check_width(call, plan)
        attend_lists(q, view, rules, state, plan.parts, program, prior)
        return state
    if view.lists is not None:
        view = view._replace(page_table=list_pages(view.lists))
    attend_blocks(q, view, rules, state, plan.schedule, plan.parts, program, prior)
    if not program.constants.merging.fused:
        merge_parts(state, plan.schedule, plan.parts, program.constants)
    return state


def attend_blocks(
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
    constants = for_call(
        constants,
        strides=None if table is None else (view.k[1:3], view.v[1:3]),
        codes=_codes_of(view, q.element_size()) if view.is_quantised else None,
        num_priors=0 if prior is None else prior.lse.shape[0],
        has_sinks=rules.sinks is not None,
    )
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
        hopper=versions.DECODE_OPTIONS if view.is_plain else versions.CODE_OPTIONS,
        **program.options,
        **({"launch_pdl": True} if constants.overlap else {}),
    )


def _codes_of(view: KeyView, itemsize: int) -> StoredCodes:
    """How the codes of quantised keys and values are loaded for queries of this size."""
    lists = view.lists
    heads = None  # lists of a token, and kv heads among which they are divided
    if lists is not None and lists.num_kv_heads > 1:
        heads = lists.lists_per_token, lists.num_kv_heads
    strides = (_scale_strides(x.scales) for x in (view.k, view.v))
    return StoredCodes(*strides, *words_of(view, itemsize), in_pairs(view, itemsize), heads)


def _scale_strides(scales: ScaleStore | None) -> tuple[int, int, int | None] | None:
    """As constants: of pages, keys and, unless heads lie first, of heads."""
    if scales is None:
        return None
    return scales.page, scales.key, scales.head if scales.head < scales.page else None


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
    if C.division.deals:  # noqa: SIM102 - one is known when compiling, the other is not
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
def attend_parts(item, given, C: tl.constexpr):
    """Attend to the fixed parts of an item: left in slots, or their merge."""
    parts = given.results.parts
    if C.division.closes_inside:
        state, merges = attend_block(item, item.part == 0, given, C)
        out, lse = finish_state(state)
        out, lse = keep_last(merges, out, lse, item.part + item.count - 1, item, parts, C)
    else:
        merges = empty_merges(C)
        tile = item.tile
        for index in range(item.part, item.part + item.count):
            end = tl.minimum(tile + item.part_tiles, item.stop)
            state, _ = attend_block(with_tiles(item, tile, end), index == 0, given, C)
            out, lse = finish_state(state)
            merges = keep_part(merges, out, lse, index, item, parts, C)
            tile = end
        out, lse = finish_merge(merges[0])
    return out, lse


@triton.jit
def with_tiles(item, tile, stop):
    """The item with other tiles."""
    return Item(
        item.block,
        item.kv_head,
        tile,
        stop,
        item.part,
        item.count,
        item.num_parts,
        item.part_tiles,
        item.first_slot,
    )


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
