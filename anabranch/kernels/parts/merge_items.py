"""Parts of ordered items, merged by a launch of their own: many programs, each for a few rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from anabranch.kernels.config import power_of_two
from anabranch.kernels.hopper_config import MERGE_BATCH, HopperConstants
from anabranch.kernels.parts.join import merge_slots
from anabranch.kernels.parts.slots import StateRows
from anabranch.kernels.schedule.items import is_cut, read_cut
from anabranch.kernels.schedule.order import cut_ints, most_cut
from anabranch.kernels.schedule.walk import Item
from anabranch.kernels.softmax.online_softmax import empty_state
from anabranch.launches.recorder import launch

BLOCK_ROWS = 128  # of a slot
MANY_PARTS = 5  # of a block, more or less, from which on they are loaded MERGE_BATCH at a time
PROGRAMS = 6  # of a processor


class MergeTile(NamedTuple):
    """What one program merges at a time."""

    rows: int
    batch: int  # parts that are under way together


@dataclass(frozen=True, slots=True, eq=False)
class MergeConstants:
    """What the merge is compiled for."""

    pack: int
    pack_heads: int
    num_packs: int
    width: int  # of values
    overlap: bool


@cache
def merge_constants(constants: HopperConstants) -> MergeConstants:
    """The part of the constants that the merge of their parts is compiled for."""
    width = constants.dv_main + constants.dv_rest
    packing = constants.pack, constants.pack_heads, constants.num_packs
    return MergeConstants(*packing, width, constants.overlap)


def merge_items(
    results: StateRows, order: torch.Tensor, slots: int, constants: HopperConstants
) -> None:
    """Write the merge of the parts that a launch of attention has left."""
    num_cut, num_rows = most_cut(slots), results.out.ptr.shape[0] * constants.pack
    # Few blocks are cut into many parts. 5 tokens, 64/8 heads, 1 x 8192 (16 parts): 21.4 us, 27.5
    # in tiles of 8 rows and 8 parts. 118 tokens, 32/16 heads, window 1024 (4 parts): the merge took
    # 10 us in tiles of 4 rows and 16 parts.
    # Fixed parts are grouped in one way, whatever the batch, for equal bits.
    least_blocks = -(-num_rows // BLOCK_ROWS) * constants.num_packs
    has_many = MANY_PARTS * least_blocks < constants.num_programs or constants.fixed_parts
    tile = MergeTile(4, MERGE_BATCH) if has_many else MergeTile(8, 4)
    row_tiles = -(-min(num_rows, BLOCK_ROWS) // tile.rows)
    units = num_cut * constants.num_packs * row_tiles
    launch(
        merge_items_kernel,
        (min(units, PROGRAMS * constants.num_programs),),
        results,
        order[-cut_ints(slots) :],
        num_cut,
        row_tiles,
        merge_constants(constants),
        tile,
        power_of_two(constants.dv_main + constants.dv_rest),
        num_warps=4,
        **({"launch_pdl": True} if constants.overlap else {}),
    )


@triton.jit(do_not_specialize=["most_cut", "row_tiles"], do_not_specialize_on_alignment=["cut_ptr"])
def merge_items_kernel(
    results,  # StateRows
    cut_ptr,  # [most_cut + 1] records of blocks that are cut
    most_cut,
    row_tiles,  # of a block
    C: tl.constexpr,  # MergeConstants
    TILE: tl.constexpr,  # MergeTile
    BLOCK_DV: tl.constexpr,
):
    """Merge some rows of a block for one pack of heads, and go on to those of the next turn.

    Few of the blocks that can be cut are, so there are no programs for those that are not. What is
    read depends on as few other reads as can be, for each takes most of a microsecond.
    """
    if C.overlap:
        gdc_wait()
    a_block = C.num_packs * row_tiles
    turn = tl.program_id(0)
    cut = read_cut(cut_ptr, turn // a_block)
    while is_cut(cut):
        pack = turn // row_tiles % C.num_packs
        merge_tile(cut, pack, turn % row_tiles * TILE.rows, results, C, TILE, BLOCK_DV)
        turn += tl.num_programs(0)
        cut = read_cut(cut_ptr, tl.minimum(turn // a_block, most_cut))


@triton.jit
def merge_tile(
    cut, pack, row, results, C: tl.constexpr, TILE: tl.constexpr, BLOCK_DV: tl.constexpr
):
    """Merge the parts of `TILE.rows` rows of a block from `row` on."""
    left = tl.minimum(cut.q_len * C.pack - cut.first_row, 128)
    if row < left:
        WIDTH: tl.constexpr = C.width
        item = Item(cut, pack, 0, 0, 0, 1, cut.num_parts, 0, cut.first_slot)
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
            (0, 1, cut.num_parts),
            item,
            results.parts,
            rows_of_slot,
            WIDTH,
            TILE.batch,
            C,
            AT_ONCE=True,
        )
        outs, lses = results.out, results.lse
        inside = is_row(rows, left, C)
        tokens, heads = place_rows(cut.first_row + rows, item, C)
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
