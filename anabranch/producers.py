"""The producers of states by name, and which of them runs a call."""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from typing import Any, Protocol, cast

import torch

from anabranch.call import AttendCall, PlanLayout, PlanOptions
from anabranch.state import AttentionState

# Asked in this order; without a name, the first that can run a call does.
PRODUCERS = {
    "torch": "anabranch.kernels.cpu.attend",
    "gluon": "anabranch.kernels.gluon.attend",
    "triton": "anabranch.kernels.triton.attend",
}
ENVIRONMENT_VARIABLE = "ANABRANCH_ATTEND"


class Producer(Protocol):
    """A module that makes states. A plan is its layout and a room, which no other module reads."""

    RESUMES: bool  # whether it goes on from the prior states of a call; else they are merged after

    def refusal(self, call: AttendCall, options: PlanOptions) -> str | None:
        """Why a call cannot run here, naming the value that is in the way; None if it can."""
        ...

    def prefers(self, call: AttendCall, options: PlanOptions) -> bool:
        """Whether it should run a call that it can run and that names no producer."""
        ...

    def lay_out(self, call: AttendCall, options: PlanOptions) -> PlanLayout:
        """What a plan of a call holds, and how large it is; nothing runs on the device."""
        ...

    def fill_plan(self, call: AttendCall, layout: Any, room: torch.Tensor) -> None:
        """Divide the work of a call on the device."""
        ...

    def attend(
        self, call: AttendCall, layout: Any, room: torch.Tensor, out: AttentionState | None
    ) -> AttentionState:
        """The state of a call, written into `out` if that is given."""
        ...


@cache
def load_producer(name: str) -> Producer:
    """The module of a producer."""
    if name not in PRODUCERS:
        raise ValueError(f"impl must be one of {', '.join(PRODUCERS)}, got {name!r}")
    return cast("Producer", import_module(PRODUCERS[name]))


def choose_producer(call: AttendCall, options: PlanOptions, impl: str | None) -> str:
    """The name of the producer that runs a call: that of `impl`, or the first that can."""
    impl = impl or _default_name()
    if impl is not None:
        if reason := load_producer(impl).refusal(call, options):
            raise ValueError(f"impl={impl!r} cannot run this call: {reason}")
        return impl
    reasons: list[str] = []
    for name in PRODUCERS:
        producer = load_producer(name)
        reason = producer.refusal(call, options)
        if reason is None and producer.prefers(call, options):
            return name
        if reason is not None:
            reasons.append(f"{name}: {reason}")
    raise ValueError(f"nothing can run this call; {'; '.join(reasons)}")


@cache
def _default_name() -> str | None:
    return os.environ.get(ENVIRONMENT_VARIABLE) or None
