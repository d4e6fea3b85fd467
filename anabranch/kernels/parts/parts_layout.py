"""What stands where in the memory of a plan: a schedule, and room for parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from anabranch.kernels.parts.slots import Parts
from anabranch.kernels.room import Piece, arrange

Program = TypeVar("Program")


@dataclass(frozen=True, slots=True)
class OpenPlan(Generic[Program]):
    """A division of work in device memory, and what the kernel that reads it is compiled for."""

    program: Program
    schedule: torch.Tensor  # int32
    counters: torch.Tensor  # int32, those of parts and before them others; 0 between launches
    parts: Parts


@dataclass(frozen=True, slots=True)
class PartsLayout(Generic[Program]):
    """The same without memory."""

    program: Program
    schedule: Piece
    outs: Piece
    lses: Piece
    counters: Piece
    slots: int
    num_others: int  # counters before those of parts

    @property
    def size(self) -> int:
        """Bytes of the room."""
        return self.counters.stop

    def open(self, room: torch.Tensor) -> OpenPlan[Program]:
        """The plan in a room."""
        counters = self.counters.open(room)
        own = counters.flatten()[self.num_others :]
        parts = Parts(self.outs.open(room), self.lses.open(room), own)
        return OpenPlan(self.program, self.schedule.open(room), counters, parts)


def lay_out_parts(
    program: Program,
    *,
    schedule_ints: int,
    slots: int,
    rows: tuple[int, ...],  # of all slots
    width: int,
    num_counters: int,
    num_others: int = 0,
) -> PartsLayout[Program]:
    """Room for a schedule, for parts and for counters."""
    pieces = arrange(
        (torch.int32, (schedule_ints,)),
        (torch.float32, (*rows, width)),
        (torch.float32, rows),
        (torch.int32, (num_others + num_counters,)),
    )
    return PartsLayout(program, *pieces, slots=slots, num_others=num_others)
