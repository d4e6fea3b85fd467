"""Where parts wait for their merge."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from anabranch.kernels.constants import AttendConstants
from anabranch.keys import KeySource


class Parts(NamedTuple):
    """Where parts wait for their merge."""

    outs: torch.Tensor  # float32 [num_slots, block_m, block_dv]
    lses: torch.Tensor  # float32 [num_slots, block_m]
    counters: torch.Tensor  # int32 [num_slots], all 0 between launches


def num_slots(keys: KeySource, blocks: int, constants: AttendConstants) -> int:
    """Two for each worker; with fixed parts, one for each part that there can be.

    Where parts are folded, only those of blocks that several workers hold wait: at most one such
    block begins in a worker's share.
    """
    division = constants.division
    if not division.fixed_parts:
        return 2 * division.num_workers * constants.num_kv_heads
    part = division.part_tiles * constants.tiles.block_n  # shorter blocks are not cut
    per_block = min(-(-keys.capacity // part), division.most_parts)
    per_seq = -(-division.whole_rows // constants.tiles.block_m)  # blocks of what is cut at all
    by_length = per_seq * (keys.total_capacity // part + keys.num_seqs)
    if division.folds_parts:
        cut = min(division.num_workers, blocks, per_seq * keys.num_seqs)
        return max(min(cut * per_block, by_length), 1) * constants.num_kv_heads
    return max(min(blocks * per_block, blocks + by_length), blocks) * constants.num_kv_heads


@triton.jit
def slot_of(part, first_slot, kv_head, C: tl.constexpr):
    """The slot of a part (int64). With fixed parts every unit of work has one for each kv head.

    Otherwise first_slot is the pair's first worker; a worker may end one pair and begin another,
    so it has two.
    """
    slot = first_slot + part
    if not C.division.fixed_parts:
        slot = 2 * slot + (part == 0)
    return slot.to(tl.int64) * C.num_kv_heads + kv_head


@triton.jit
def store_slot(out, lse, slot, rows, num_rows, parts, C: tl.constexpr):
    """Write those of a part's rows that belong to somebody into its slot."""
    inside = rows < num_rows
    rows = slot * C.tiles.block_m + rows
    dims = tl.arange(0, C.tiles.block_dv)
    tl.store(parts.outs + rows[:, None] * C.tiles.block_dv + dims[None, :], out, inside[:, None])
    tl.store(parts.lses + rows, lse, inside)


@triton.jit
def leave_part(out, lse, part, first_slot, kv_head, num_rows, parts, C: tl.constexpr):
    """Leave a part where the tree looks for it."""
    rows = tl.arange(0, C.tiles.block_m)
    store_slot(out, lse, slot_of(part, first_slot, kv_head, C), rows, num_rows, parts, C)
