"""The division of work over latent keys on Hopper: the Triton kernel's schedule, in other tiles."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from anabranch.call import AttendCall, PlanOptions
from anabranch.device import has_overlap, num_sms
from anabranch.kernels.gluon.latent_config import (
    BLOCK_ROWS,
    LatentConstants,
    LatentTiles,
    latent_constants,
)
from anabranch.kernels.triton.merge_tree import Parts
from anabranch.kernels.triton.plan import num_slots
from anabranch.kernels.triton.schedule import schedule
from anabranch.kernels.triton.schedule_layout import num_blocks_bound, schedule_size


@dataclass(frozen=True, slots=True)
class LatentPlan:
    """A schedule in device memory, room for parts, and what the kernel is compiled for."""

    schedule: torch.Tensor  # int32
    parts: Parts  # outs [slots, 2, 64, 256]: the halves of the columns apart; lses [slots, 2, 64]
    constants: LatentConstants


def make_latent_plan(call: AttendCall, options: PlanOptions) -> LatentPlan:
    """Allocate, and divide the work on the device."""
    queries, keys, rules, view = call
    q, num_seqs = queries.packed, keys.num_seqs
    tiles = options.config or LatentTiles()
    assert isinstance(tiles, LatentTiles)
    constants = latent_constants(
        tiles,
        causal=rules.in_order,
        num_heads=q.shape[1],
        page_size=view.page_size,
        num_programs=num_sms(q.device),
        fixed_parts=options.batch_invariant,
        overlap=has_overlap(q.device),
    )
    work = constants.work
    slots = num_slots(keys, num_blocks_bound(num_seqs, q.shape[0], work), work)
    shape = (slots, 2, BLOCK_ROWS)
    size = schedule_size(num_seqs, q.shape[0], work)
    plan = LatentPlan(
        torch.empty(size, dtype=torch.int32, device=q.device),
        Parts(
            torch.empty((*shape, work.head_dim_v // 2), dtype=torch.float32, device=q.device),
            torch.empty(shape, dtype=torch.float32, device=q.device),
            torch.zeros((slots, 2, 2), dtype=torch.int32, device=q.device),
        ),
        constants,
    )
    schedule(
        plan.schedule,
        queries.starts(),
        *keys.lengths,
        keys.capacity,
        q.shape[0],
        rules.window,
        work,
    )
    return plan
