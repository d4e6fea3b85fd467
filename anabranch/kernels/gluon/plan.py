"""The division of a call's work on Hopper: tiles, the order of items, room for parts."""

from __future__ import annotations

import torch

from anabranch.call import AttendCall, PlanOptions
from anabranch.device import has_overlap, num_sms
from anabranch.kernels.hopper_config import (
    FEW_BLOCKS,
    FEW_KEYS,
    FEW_ROWS,
    FEW_TILES,
    HopperConstants,
    HopperTiles,
    hopper_constants,
    select_packing,
    select_tiles,
)
from anabranch.kernels.parts.slots import PartsLayout, lay_out_parts
from anabranch.kernels.schedule.order import BLOCK_M, may_split, num_slots, order, order_size

HopperLayout = PartsLayout[HopperConstants]


def lay_out(call: AttendCall, options: PlanOptions) -> HopperLayout:
    """Select tiles, and room for the order of items and for parts."""
    keys, num_tokens = call.keys, call.queries.packed.shape[0]
    constants = _select_constants(call, options)
    slots = num_slots(keys.num_seqs, num_tokens, most_seen(call, constants), constants)
    return lay_out_parts(
        constants,
        schedule_ints=order_size(keys.num_seqs, num_tokens, slots, constants),
        slots=slots,
        rows=(slots * constants.num_packs * BLOCK_M.value,),
        width=keys.head_dim_v,
        num_counters=0,  # parts are merged by a launch of their own
        num_others=1,  # hands out the items
    )


def fill_plan(call: AttendCall, layout: HopperLayout, room: torch.Tensor) -> None:
    """Order the work on the device."""
    plan = layout.open(room)
    order(plan.schedule, plan.counters, call, layout.slots, plan.program)


def guess_tokens(call: AttendCall, options: PlanOptions) -> tuple[float, int]:
    """Tokens of a long sequence, and how many have one: what the host can guess of a batch.

    Over pages, tokens that do not divide evenly are taken for those of a prompt beside decodes.
    """
    num_tokens, num_heads, _ = call.queries.packed.shape
    num_seqs = max(call.keys.num_seqs, 1)
    if options.rows_per_seq is not None:
        return options.rows_per_seq * call.keys.num_kv_heads / num_heads, 0
    if options.batch_invariant:  # padding tokens must not change bits
        return BLOCK_M.value, 0
    is_mixed = call.view.page_table is not None and num_tokens % num_seqs != 0
    if is_mixed and num_tokens > num_seqs:
        return num_tokens - num_seqs + 1, num_seqs - 1
    return num_tokens / num_seqs, 0


def keys_of_block(call: AttendCall, pack: int, num_decodes: int) -> float:
    """How many keys the rows of a block see on average, as far as the host knows.

    Beside decodes, those of a prompt: most blocks are its own.
    """
    keys, window, seen = call.keys, call.rules.window, float(call.keys.capacity)
    if not num_decodes:
        seen = min(seen, keys.total_capacity / max(keys.num_seqs, 1))
    return seen if window is None else min(seen, window + BLOCK_M.value // pack)


def most_seen(call: AttendCall, constants: HopperConstants) -> int:
    """Keys that the rows of a block can see; fixed parts are cut from the first key on."""
    capacity, window = call.keys.capacity, call.rules.window
    if window is None or constants.fixed_parts:
        return capacity
    return min(capacity, window + BLOCK_M.value)


def _select_constants(call: AttendCall, options: PlanOptions) -> HopperConstants:
    q, keys, rules, view = call.queries.packed, call.keys, call.rules, call.view
    num_tokens, num_heads, head_dim_k = q.shape
    group = num_heads // keys.num_kv_heads
    tokens_per_seq, num_decodes = guess_tokens(call, options)
    packing = select_packing(group, tokens_per_seq, num_decodes)
    num_packs = num_heads // packing.heads
    blocks = max(num_tokens * packing.pack // BLOCK_M.value, keys.num_seqs) * num_packs
    # Tiles that depended on the number of sequences would not be batch-invariant.
    programs, may_vary = num_sms(q.device), not options.batch_invariant
    seen = keys_of_block(call, packing.pack, num_decodes)
    few_tiles = blocks * seen <= FEW_TILES * 128 * programs
    few_rows = tokens_per_seq * packing.pack <= FEW_ROWS or few_tiles
    splits = may_split(keys.num_seqs, num_tokens, num_packs, packing.pack, programs, rules.in_order)
    splits |= options.batch_invariant  # one program, or bits would differ
    tiles = options.config or select_tiles(
        head_dim_k,
        keys.head_dim_v,
        few_blocks=blocks <= FEW_BLOCKS and few_rows and may_vary,
        few_keys=seen <= FEW_KEYS and may_vary,
        splits=splits,
    )
    assert isinstance(tiles, HopperTiles)
    return hopper_constants(
        tiles,
        causal=rules.in_order,
        packing=packing,
        num_heads=num_heads,
        num_kv_heads=keys.num_kv_heads,
        page_size=0 if view.page_table is None else view.page_size,
        head_dim_k=head_dim_k,
        head_dim_v=keys.head_dim_v,
        num_programs=programs,
        fixed_parts=options.batch_invariant,
        splits=splits,
        overlap=has_overlap(q.device),
    )
