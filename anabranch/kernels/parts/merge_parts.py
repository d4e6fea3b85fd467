"""Parts merged by a launch of their own: many programs, each for a few rows of a block."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from anabranch.kernels.constants import AttendConstants
from anabranch.kernels.load.arguments import Rows
from anabranch.kernels.parts.join import merge_children
from anabranch.kernels.parts.slots import Parts, StateRows, rows_left, store_slot, write_rows
from anabranch.kernels.schedule.walk import (
    Item,
    part_tiles_of,
    parts_of,
    read_block,
    read_header,
)
from anabranch.launches.recorder import launch
from anabranch.state import AttentionState

PROGRAMS_PER_WORKER = 8  # at most: with more rows, a program merges several in turn


def merge_parts(
    state: AttentionState, schedule: torch.Tensor, parts: Parts, constants: AttendConstants
) -> None:
    """Write the merge of the parts that a launch of attention has left."""
    num_workers = constants.division.num_workers
    rounds = -(-state.out.shape[0] * constants.group // constants.merging.rows)
    programs = min(max(rounds, num_workers), PROGRAMS_PER_WORKER * num_workers)
    launch(
        merge_parts_kernel,
        (constants.num_kv_heads, programs),
        Rows(state.out, *state.out.stride()),
        Rows(state.lse, *state.lse.stride(), 0),
        schedule,
        parts,
        constants,
        num_warps=4,
        **({"launch_pdl": True} if constants.overlap else {}),
    )


@triton.jit
def merge_parts_kernel(
    out_rows,  # Rows [num_tokens, num_heads, head_dim_v]
    lse_rows,  # Rows [num_tokens, num_heads, 1]
    schedule_ptr,  # as schedule.py lays it out
    parts,  # Parts
    C: tl.constexpr,  # AttendConstants
):
    """Merge the parts of all blocks that have several."""
    if C.overlap:
        gdc_wait()
    results = StateRows(out_rows, lse_rows, parts)
    kv_head = tl.program_id(0)
    header = read_header(schedule_ptr)
    num_blocks = header.num_blocks
    if header.num_rounds > 0:
        num_blocks = 0  # all were dealt out whole
    ROUNDS: tl.constexpr = C.tiles.block_m // C.merging.rows
    for turn in range(tl.program_id(1), num_blocks * ROUNDS, tl.num_programs(1)):
        block = read_block(schedule_ptr, turn // ROUNDS, C)
        row = turn % ROUNDS * C.merging.rows
        left = tl.minimum(rows_left(block, C), C.tiles.block_m)
        if (block.num_tiles > 0) & (row < left):
            num_parts, first_slot = parts_of(schedule_ptr, header.share, block, C)
            if num_parts > 1:
                item = Item(block, kv_head, 0, 0, 0, num_parts, num_parts, 0, first_slot)
                rows = row + tl.arange(0, C.merging.rows)
                span = 1
                children = num_parts
                if C.division.folds_parts:
                    span = C.merging.group_parts
                    children = tl.cdiv(num_parts, C.merging.group_parts)
                    merge_shared(header.share, rows, left, item, parts, C)
                out, lse = merge_children(0, span, children, rows, left, item, parts, C)
                write_rows(out, lse, rows + block.first_row, item, results, C)


@triton.jit
def merge_shared(share, rows, left, item, parts, C: tl.constexpr):
    """Merge some rows of the groups whose fixed parts are of several workers, each to one state."""
    block = item.block
    size = part_tiles_of(block.num_tiles, block.q_len * C.group, C)
    for node in range(0, item.num_parts, C.merging.group_parts):
        children = tl.minimum(item.num_parts - node, C.merging.group_parts)
        first = block.first_unit + node * size
        last = block.first_unit + (node + children - 1) * size
        if first // share != last // share:
            out, lse = merge_children(node, 1, children, rows, left, item, parts, C)
            tl.debug_barrier()  # the first part's slot has been read
            store_slot(out, lse, node, rows, left, item, parts, C)
    tl.debug_barrier()  # merges of other rows are stored by other threads
