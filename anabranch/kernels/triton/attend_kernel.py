"""Attention of any query length over keys of any source: one kernel for all of them.

A program walks its share of the schedule, a pair (block of query rows, kv head) at a time. A pair
that one program holds whole is written directly; otherwise each leaves a part, and parts are merged
in a tree whose every node is done by whoever arrives there last. Nobody waits.
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
from anabranch.kernels.load.addressing import Rows, view_arguments
from anabranch.kernels.load.boxes import boxes_of
from anabranch.kernels.load.key_pairs import in_pairs
from anabranch.kernels.load.packed_codes import in_words
from anabranch.kernels.parts.merge_groups import merge_groups
from anabranch.kernels.parts.merge_tree import merge_tree
from anabranch.kernels.parts.output import write_rows
from anabranch.kernels.parts.slots import Parts, leave_part
from anabranch.kernels.schedule.schedule_layout import (
    is_dealt,
    pair_of,
    part_of,
    part_tiles_of,
    parts_held,
    read_block,
    read_dealt,
    read_header,
    read_worker,
    units_of,
)
from anabranch.kernels.softmax.online_softmax import (
    LOG2_E,
    empty_state,
    finish_state,
)
from anabranch.kernels.triton.attend_block import attend_pair, attend_parts
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
        constants = with_page_strides(constants, (*view.k[1:3], *view.v[1:3]))
    if view.k.scales or view.v.scales:
        strides = (scale_strides(x.scales) for x in (view.k, view.v))
        halves = q.element_size() == 2 and not view.values_in_keys
        words = (halves and in_words(x) for x in (view.k, view.v))
        pairs = halves and in_pairs(view)
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
    """Attend to the pairs of this program's share of the schedule."""
    if C.overlap:  # nothing is read before the kernel ahead has ended
        gdc_wait()
        if C.leaves_empty:  # there may be nothing to do, and the next kernel can come
            gdc_launch_dependents()
    source = (view, (k_box, k_rest_box, v_box), table_stride)
    program = tl.program_id(0)
    worker = program // C.num_kv_heads
    share, num_units, num_blocks, num_empty, orphans, num_rounds = read_header(schedule_ptr)
    block, record = read_worker(schedule_ptr, tl.minimum(worker, C.division.num_workers - 1))
    unit = worker * share
    stop = tl.where(worker < C.division.num_workers, tl.minimum(unit + share, num_units), unit)
    if not is_dealt(C):
        num_rounds = 0  # known to the compiler
    if num_rounds > 0:
        unit = 0
        stop = num_rounds
    while unit < stop:
        kv_head = program % C.num_kv_heads
        tile, tile_stop, part, count, num_parts, first_slot = 0, 0, 0, 1, 1, 0
        size = 0  # tiles of a fixed part
        if num_rounds > 0:
            place, kv_head = pair_of(unit, program, C)
            unit += 1
            if place < num_blocks:
                record = read_dealt(schedule_ptr, place, num_blocks, C)
                _, _, _, q_len, _, tile, num_tiles, _ = record
                tile_stop = tile + num_tiles
                if C.division.folds_parts:
                    size = part_tiles_of(num_tiles, q_len * C.group, C)
                    num_parts = tl.cdiv(num_tiles, size)
                    count = num_parts
        else:
            _, _, _, q_len, _, first_tile, num_tiles, first_unit = record
            num_rows = q_len * C.group
            begin = unit - first_unit
            units = units_of(num_tiles, num_rows, C)
            if begin >= units:
                block += 1
                record = read_block(schedule_ptr, block, C)
            else:
                end = tl.minimum(units, stop - first_unit)
                unit = first_unit + end
                extent = (num_rows, first_tile, num_tiles, first_unit)
                if C.division.folds_parts:
                    tile, tile_stop, part, count, num_parts, size, first_slot = parts_held(
                        begin, end, share, extent, schedule_ptr, C
                    )
                else:
                    tile, tile_stop, part, num_parts, first_slot = part_of(
                        begin, end, worker, share, extent, C
                    )
        if tile < tile_stop:
            origin, first_row, q_start, q_len, seq_len, _, _, _ = record
            num_rows = q_len * C.group
            pair = (origin, q_len, seq_len, kv_head)
            if C.division.folds_parts:
                held = (part, count, num_parts, size, first_slot, parts)
                out, lse = attend_parts(
                    q, (first_row, q_start), pair, tile, tile_stop, source, rules, tree_width,
                    prior, held, C,
                )  # fmt: skip
            else:
                ended = attend_pair(
                    q, (first_row, q_start), pair, tile, tile_stop, part == 0, source, rules,
                    tree_width, prior, None, C,
                )  # fmt: skip
                out, lse = finish_state(ended[0])
            if count == num_parts:
                rows = first_row + tl.arange(0, C.tiles.block_m)
                write_rows(out, lse, rows, num_rows, q_start, kv_head, out_rows, lse_rows, C)
            else:
                if not C.division.folds_parts:
                    left = num_rows - first_row
                    leave_part(out, lse, part, first_slot, kv_head, left, parts, C)
                if C.merging.fused and C.division.folds_parts:
                    merge_groups(
                        part, count, num_parts, first_slot, first_row, num_rows, q_start,
                        kv_head, parts, out_rows, lse_rows, C,
                    )  # fmt: skip
                elif C.merging.fused:
                    merge_tree(
                        part, num_parts, first_slot, first_row, num_rows, q_start,
                        kv_head, parts, out_rows, lse_rows, C,
                    )  # fmt: skip

    if C.leaves_empty:
        num_empty = 0  # known to the compiler
    if num_empty > 0:
        write_empty(
            program, worker, num_blocks, orphans, rules.sinks, prior, out_rows, lse_rows,
            schedule_ptr, C,
        )  # fmt: skip


@triton.jit
def write_empty(
    program, worker, num_blocks, orphans, sinks_ptr, prior, out_rows, lse_rows, schedule_ptr,
    C: tl.constexpr,
):  # fmt: skip
    """Write the blocks that see no keys: no worker's share leads there."""
    kv_head = program % C.num_kv_heads
    for block in range(worker, num_blocks, C.division.num_workers):
        _, first_row, q_start, q_len, _, _, num_tiles, _ = read_block(schedule_ptr, block, C)
        if num_tiles == 0:
            rows = first_row + tl.arange(0, C.tiles.block_m)
            num_rows = q_len * C.group
            out, lse = finish_state(empty_state(C.tiles.block_m, C.tiles.block_dv))
            if sinks_ptr is not None:
                heads = kv_head * C.group + rows % C.group
                owned = (rows < num_rows) & (q_start < orphans)
                lse = tl.load(sinks_ptr + heads, owned, other=float("-inf")).to(tl.float32)
            if C.num_priors > 0:
                state = (lse * LOG2_E, tl.where(lse == float("-inf"), 0.0, 1.0), out)
                tokens, heads = q_start + rows // C.group, kv_head * C.group + rows % C.group
                state = resume(state, prior, tokens, heads, rows < num_rows, C)
                out, lse = finish_state(state)
            write_rows(out, lse, rows, num_rows, q_start, kv_head, out_rows, lse_rows, C)
