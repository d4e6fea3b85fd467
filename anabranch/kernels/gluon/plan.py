"""The division of a call's work on Hopper: tiles, the order of items, room for parts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from anabranch.call import AttendCall, PlanOptions
from anabranch.device import has_overlap, num_sms
from anabranch.kernels.hopper_config import (
    FEW_BLOCKS,
    HopperConstants,
    HopperTiles,
    hopper_constants,
    pack_of,
    select_tiles,
)
from anabranch.kernels.parts.slots import Parts
from anabranch.kernels.room import Piece, arrange
from anabranch.kernels.schedule.order import BLOCK_M, may_split, num_slots, order, order_size


@dataclass(frozen=True, slots=True)
class HopperPlan:
    """The order of items in device memory, the counter that hands them out, and room for parts."""

    order: torch.Tensor  # int32
    counter: torch.Tensor  # int32 [1], 0 between launches
    parts: Parts
    constants: HopperConstants


@dataclass(frozen=True, slots=True)
class HopperLayout:
    """The same without memory: what stands where in a room."""

    constants: HopperConstants
    slots: int
    order: Piece
    outs: Piece
    lses: Piece
    counters: Piece  # that of the items, and one for each consumer's rows of a part

    @property
    def size(self) -> int:
        """Bytes of the room."""
        return self.counters.stop

    def open(self, room: torch.Tensor) -> HopperPlan:
        """The plan in a room."""
        counters = self.counters.open(room)
        parts = Parts(self.outs.open(room), self.lses.open(room), counters[1:])
        return HopperPlan(self.order.open(room), counters[:1], parts, self.constants)


def lay_out(call: AttendCall, options: PlanOptions) -> HopperLayout:
    """Select tiles, and room for the order of items and for parts."""
    keys, num_tokens = call.keys, call.queries.packed.shape[0]
    constants = _select_constants(call, options)
    slots = num_slots(keys.num_seqs, num_tokens, keys.capacity, constants)
    rows = slots * constants.num_packs * BLOCK_M.value
    pieces = arrange(
        (torch.int32, (order_size(keys.num_seqs, num_tokens, slots, constants),)),
        (torch.float32, (rows, keys.head_dim_v)),
        (torch.float32, (rows,)),
        (torch.int32, (1 + slots * constants.num_packs * 2,)),
    )
    return HopperLayout(constants, slots, *pieces)


def fill_plan(call: AttendCall, layout: HopperLayout, room: torch.Tensor) -> None:
    """Order the work on the device."""
    counters = layout.counters.open(room)
    order(layout.order.open(room), counters, call, layout.slots, layout.constants)


def _select_constants(call: AttendCall, options: PlanOptions) -> HopperConstants:
    q, keys, rules, view = call.queries.packed, call.keys, call.rules, call.view
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
