"""Parts merged by a launch of their own: many programs, each for a few rows of a block."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from anabranch.kernels.constants import AttendConstants
from anabranch.kernels.load.addressing import Rows
from anabranch.kernels.parts.merge_tree import merge_children
from anabranch.kernels.parts.output import write_rows
from anabranch.kernels.parts.slots import Parts, slot_of, store_slot
from anabranch.kernels.schedule.schedule_layout import (
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
def merge_parts_kernel(out_rows, lse_rows, schedule_ptr, parts, C: tl.constexpr):
    """Merge the parts of all blocks that have several."""
    if C.overlap:
        gdc_wait()
    kv_head = tl.program_id(0)
    share, _, num_blocks, _, _, num_rounds = read_header(schedule_ptr)
    if num_rounds > 0:
        num_blocks = 0  # all were dealt out whole
    ROUNDS: tl.constexpr = C.tiles.block_m // C.merging.rows
    for item in range(tl.program_id(1), num_blocks * ROUNDS, tl.num_programs(1)):
        _, first_row, q_start, q_len, _, first_tile, num_tiles, first_unit = read_block(
            schedule_ptr, item // ROUNDS, C
        )
        row = item % ROUNDS * C.merging.rows
        num_rows = q_len * C.group
        left = tl.minimum(num_rows - first_row, C.tiles.block_m)
        if (num_tiles > 0) & (row < left):
            place = num_rows, first_tile, num_tiles, first_unit
            num_parts, first_slot = parts_of(schedule_ptr, share, place, C)
            if num_parts > 1:
                rows = row + tl.arange(0, C.merging.rows)
                span = 1
                children = num_parts
                if C.division.folds_parts:
                    span = C.merging.group_parts
                    children = tl.cdiv(num_parts, C.merging.group_parts)
                    merge_shared(share, place, num_parts, first_slot, kv_head, rows, left, parts, C)
                out, lse = merge_children(
                    0, span, children, first_slot, kv_head, rows, left, parts, C
                )
                rows += first_row
                write_rows(out, lse, rows, num_rows, q_start, kv_head, out_rows, lse_rows, C)


@triton.jit
def merge_shared(share, block, num_parts, first_slot, kv_head, rows, left, parts, C: tl.constexpr):
    """Merge some rows of the groups whose fixed parts are of several workers, each to one state."""
    num_rows, _, num_tiles, first_unit = block
    size = part_tiles_of(num_tiles, num_rows, C)
    for node in range(0, num_parts, C.merging.group_parts):
        children = tl.minimum(num_parts - node, C.merging.group_parts)
        first, last = first_unit + node * size, first_unit + (node + children - 1) * size
        if first // share != last // share:
            out, lse = merge_children(node, 1, children, first_slot, kv_head, rows, left, parts, C)
            tl.debug_barrier()  # the first part's slot has been read
            store_slot(out, lse, slot_of(node, first_slot, kv_head, C), rows, left, parts, C)
    tl.debug_barrier()  # merges of other rows are stored by other threads
