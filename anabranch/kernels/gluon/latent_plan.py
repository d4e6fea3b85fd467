"""The division of work over latent keys on Hopper: the Triton kernel's schedule, in other tiles."""

from __future__ import annotations

import torch

from anabranch.call import AttendCall, PlanOptions
from anabranch.device import has_overlap, num_sms
from anabranch.kernels.gluon.latent_config import (
    BLOCK_ROWS,
    LatentConstants,
    LatentTiles,
    latent_constants,
)
from anabranch.kernels.parts.slots import PartsLayout, lay_out_parts, num_slots
from anabranch.kernels.schedule.schedule import num_blocks_bound, schedule_size
from anabranch.kernels.schedule.schedule import schedule as write_schedule

LatentLayout = PartsLayout[LatentConstants]


def lay_out(call: AttendCall, options: PlanOptions) -> LatentLayout:
    """Room for a schedule and for parts."""
    q, keys = call.queries.packed, call.keys
    tiles = options.config or LatentTiles()
    assert isinstance(tiles, LatentTiles)
    constants = latent_constants(
        tiles,
        causal=call.rules.in_order,
        num_heads=q.shape[1],
        page_size=call.view.page_size,
        num_programs=num_sms(q.device),
        fixed_parts=options.batch_invariant,
        overlap=has_overlap(q.device),
    )
    work = constants.work
    slots = num_slots(keys, num_blocks_bound(keys.num_seqs, q.shape[0], work), work)
    return lay_out_parts(
        constants,
        schedule_ints=schedule_size(keys.num_seqs, q.shape[0], work),
        slots=slots,
        rows=(slots, 2, BLOCK_ROWS),  # the halves of the columns apart
        width=work.head_dim_v // 2,
        num_counters=slots * 4,  # two for each half
    )


def fill_plan(call: AttendCall, layout: LatentLayout, room: torch.Tensor) -> None:
    """Divide the work on the device."""
    plan = layout.open(room)
    write_schedule(plan.schedule, plan.parts.counters, call, plan.program.work)
