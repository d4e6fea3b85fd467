"""Parts of ordered items, merged by a launch of their own: many programs, each for a few rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from anabranch.kernels.config import power_of_two
from anabranch.kernels.hopper_config import HopperConstants
from anabranch.kernels.parts.join import merge_slots
from anabranch.kernels.parts.slots import StateRows
from anabranch.kernels.schedule.items import read_item, read_part
from anabranch.kernels.schedule.order import most_cut
from anabranch.kernels.schedule.walk import Item
from anabranch.kernels.softmax.online_softmax import empty_state
from anabranch.launches.recorder import launch

BLOCK_ROWS = 128  # of a slot
FEW_ROWS = 4096  # of all blocks that are cut: they have four parts and more


class MergeTile(NamedTuple):
    """What one program merges at a time."""

    rows: int
    batch: int  # parts that are under way together


def merge_items(
    results: StateRows, order: torch.Tensor, slots: int, constants: HopperConstants
) -> None:
    """Write the merge of the parts that a launch of attention has left."""
    num_cut = most_cut(slots)
    most_rows = min(results.out.ptr.shape[0] * constants.pack, BLOCK_ROWS)
    all_rows = results.out.ptr.shape[0] * constants.pack * constants.num_packs
    # Blocks are the fastest axis: few of those that can be cut are, so they spread over processors.
    # 5 tokens, 64/8 heads, 1 x 8192 (16 parts): 21.4 us, 27.5 in tiles of 8 rows and 8 parts
    tile = MergeTile(4, 16) if all_rows <= FEW_ROWS else MergeTile(8, 4)
    launch(
        merge_items_kernel,
        (num_cut, constants.num_packs, -(-most_rows // tile.rows)),
        results,
        order,
        order[-num_cut:],
        constants,
        tile,
        power_of_two(constants.dv_main + constants.dv_rest),
        num_warps=4,
        **({"launch_pdl": True} if constants.overlap else {}),
    )


@triton.jit(do_not_specialize_on_alignment=["cut_ptr"])
def merge_items_kernel(
    results,  # StateRows
    order_ptr,  # as order.py lays it out
    cut_ptr,  # [most_cut] the first item of each block that is cut
    C: tl.constexpr,  # HopperConstants
    TILE: tl.constexpr,  # MergeTile
    BLOCK_DV: tl.constexpr,
):
    """Merge some rows of the parts of one block, for one pack of heads.

    A program for each: a loop over them took 3.5 us more for 5 tokens, 64/8 heads, 1 x 8192.
    """
    if C.overlap:
        gdc_wait()
    num_cut = tl.load(order_ptr + 3)
    first = tl.load(cut_ptr + tl.program_id(0))
    if tl.program_id(0) < num_cut:
        WIDTH: tl.constexpr = C.dv_main + C.dv_rest
        block = read_item(order_ptr, first)
        _, num_parts, first_slot = read_part(order_ptr, first)
        row = tl.program_id(2) * TILE.rows
        left = tl.minimum(block.q_len * C.pack - block.first_row, 128)
        if row < left:
            item = Item(block, tl.program_id(1), 0, 0, 0, 1, num_parts, 0, first_slot)
            rows = row + tl.arange(0, TILE.rows)
            dims = tl.arange(0, BLOCK_DV)
            columns = dims
            if BLOCK_DV != WIDTH:  # no column of the next row, which may be none
                columns = tl.minimum(dims, WIDTH - 1)
            out, lse = merge_slots(
                empty_state(TILE.rows, BLOCK_DV),
                rows,
                left,
                columns[None, :],
                (0, 1, num_parts),
                item,
                results.parts,
                rows_of_slot,
                WIDTH,
                TILE.batch,
                C,
            )
            outs, lses = results.out, results.lse
            inside = is_row(rows, left, C)
            tokens, heads = place_rows(block.first_row + rows, item, C)
            tl.store(lses.ptr + tokens * lses.token + heads * lses.head, lse, inside)
            starts = tokens * outs.token + heads * outs.head
            mask = inside[:, None] & (dims < WIDTH)[None, :]
            out = out.to(outs.ptr.dtype.element_ty)
            tl.store(outs.ptr + starts[:, None] + dims[None, :], out, mask)


@triton.jit
def rows_of_slot(part, rows, item, C: tl.constexpr):
    """Where rows of a part wait (int64)."""
    slot = item.first_slot + part
    return (slot.to(tl.int64) * C.num_packs + item.kv_head) * 128 + rows


@triton.jit
def is_row(rows, num_rows, C: tl.constexpr):
    """Whether rows belong to a token of the sequence and to a head of the pack."""
    inside = rows < num_rows
    if C.pack_heads != C.pack:
        inside = inside & (rows % C.pack < C.pack_heads)
    return inside


@triton.jit
def place_rows(rows, item, C: tl.constexpr):
    """Token and head of each row (int64)."""
    tokens = (item.block.q_start + rows // C.pack).to(tl.int64)
    return tokens, (item.kv_head * C.pack_heads + rows % C.pack).to(tl.int64)
