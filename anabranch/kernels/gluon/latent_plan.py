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
from anabranch.kernels.parts.slots import Parts, num_slots
from anabranch.kernels.room import Piece, arrange
from anabranch.kernels.schedule.schedule import schedule as write_schedule
from anabranch.kernels.schedule.schedule_layout import num_blocks_bound, schedule_size


@dataclass(frozen=True, slots=True)
class LatentPlan:
    """A schedule in device memory, room for parts, and what the kernel is compiled for."""

    schedule: torch.Tensor  # int32
    parts: Parts  # outs [slots, 2, 64, 256]: the halves of the columns apart; lses [slots, 2, 64]
    constants: LatentConstants


@dataclass(frozen=True, slots=True)
class LatentLayout:
    """The same without memory: what stands where in a room."""

    constants: LatentConstants
    schedule: Piece
    parts: tuple[Piece, ...]  # outs, lses, counters

    @property
    def size(self) -> int:
        """Bytes of the room."""
        return self.parts[-1].stop

    def open(self, room: torch.Tensor) -> LatentPlan:
        """The plan in a room."""
        parts = Parts(*(piece.open(room) for piece in self.parts))
        return LatentPlan(self.schedule.open(room), parts, self.constants)


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
    rows = (slots, 2, BLOCK_ROWS)
    schedule, *parts = arrange(
        (torch.int32, (schedule_size(keys.num_seqs, q.shape[0], work),)),
        (torch.float32, (*rows, work.head_dim_v // 2)),
        (torch.float32, rows),
        (torch.int32, (slots, 2, 2)),
    )
    return LatentLayout(constants, schedule, tuple(parts))


def fill_plan(call: AttendCall, layout: LatentLayout, room: torch.Tensor) -> None:
    """Divide the work on the device."""
    plan = layout.open(room)
    write_schedule(plan.schedule, plan.parts.counters, call, plan.constants.work)
