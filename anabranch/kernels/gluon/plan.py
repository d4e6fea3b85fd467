"""The division of a call's work on Hopper: tiles, the order of items, room for parts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from anabranch.call import AttendCall, PlanOptions
from anabranch.device import has_overlap, num_sms
from anabranch.kernels.gluon.config import (
    FEW_BLOCKS,
    HopperConstants,
    HopperTiles,
    hopper_constants,
    pack_of,
    select_tiles,
)
from anabranch.kernels.gluon.order import BLOCK_M, may_split, num_slots, order, order_size
from anabranch.kernels.triton.merge_tree import Parts


@dataclass(frozen=True, slots=True)
class HopperPlan:
    """The order of items in device memory, the counter that hands them out, and room for parts."""

    order: torch.Tensor  # int32
    counter: torch.Tensor  # int32 [1], 0 between launches
    parts: Parts
    constants: HopperConstants


def make_hopper_plan(call: AttendCall, options: PlanOptions) -> HopperPlan:
    """Select tiles, allocate, and order the work on the device."""
    queries, keys, rules, _ = call
    q, num_seqs = queries.packed, keys.num_seqs
    constants = _select_constants(call, options)
    slots = num_slots(num_seqs, q.shape[0], keys.capacity, constants)
    rows = slots * constants.num_packs * BLOCK_M.value
    size = order_size(num_seqs, q.shape[0], slots, constants)
    counters = torch.zeros(
        1 + slots * constants.num_packs * 2, dtype=torch.int32, device=q.device
    )  # that of the items, and one for each consumer's rows of a part
    plan = HopperPlan(
        torch.empty(size, dtype=torch.int32, device=q.device),
        counters[:1],
        Parts(
            torch.empty((rows, keys.head_dim_v), dtype=torch.float32, device=q.device),
            torch.empty(rows, dtype=torch.float32, device=q.device),
            counters[1:],
        ),
        constants,
    )
    order(
        plan.order,
        queries.starts(),
        *keys.lengths,
        keys.capacity,
        q.shape[0],
        rules.window,
        slots,
        constants,
    )
    return plan


def _select_constants(call: AttendCall, options: PlanOptions) -> HopperConstants:
    queries, keys, rules, view = call
    q = queries.packed
    num_tokens, num_heads, head_dim_k = q.shape
    pack = pack_of(num_heads // keys.num_kv_heads)
    blocks = max(num_tokens * pack // BLOCK_M.value, keys.num_seqs) * num_heads // pack
    # Tiles that depended on the number of sequences would not be batch-invariant.
    few_blocks = blocks <= FEW_BLOCKS and not options.batch_invariant
    tiles = options.config or select_tiles(head_dim_k, keys.head_dim_v, few_blocks=few_blocks)
    assert isinstance(tiles, HopperTiles)
    programs = num_sms(q.device)
    splits = may_split(keys.num_seqs, num_tokens, num_heads // pack, pack, programs)
    return hopper_constants(
        tiles,
        causal=rules.in_order,
        pack=pack,
        num_heads=num_heads,
        num_kv_heads=keys.num_kv_heads,
        page_size=0 if view.page_table is None else view.page_size,
        head_dim_k=head_dim_k,
        head_dim_v=keys.head_dim_v,
        num_programs=programs,
        fixed_parts=options.batch_invariant,
        splits=splits or options.batch_invariant,  # one program, or bits would differ
        overlap=has_overlap(q.device),
    )
