"""Notices an engine that hangs: one whose process stands still, or one whose step does not end."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from anabranch.llm.server.messages import Beat


@dataclass(frozen=True, slots=True, kw_only=True)
class HangPolicy:
    """When an engine counts as dead though its process has not ended.

    Beats come from a thread beside the steps, so that no step is long enough to silence them. A
    step computes a bounded number of tokens, however long a prompt is; the first may compile.
    """

    silence_seconds: float = 30.0  # without a message
    step_seconds: float = 600.0  # of one step

    def __post_init__(self) -> None:
        for name in ("silence_seconds", "step_seconds"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, got {getattr(self, name)}")


class EngineWatch:
    """What is known of a process. Nothing is expected of it before its first message.

    Time is what the watching process itself has lived through: while that stands still, messages
    wait, and nobody is to blame for their absence.
    """

    def __init__(self, policy: HangPolicy) -> None:
        self._policy = policy
        self._begun = False
        self._silent = self._step = 0.0  # seconds

    def hear(self, message: Any) -> None:
        """A message of the process, whatever it says."""
        self._begun, self._silent = True, 0.0
        if isinstance(message, Beat):
            self._step = message.step_seconds

    def pass_time(self, seconds: float) -> str | None:
        """Why the engine counts as dead after so much more time, if it does."""
        self._silent += seconds if self._begun else 0.0
        if self._silent > self._policy.silence_seconds:
            return f"the engine hangs: it has sent nothing for {self._silent:.0f} seconds"
        if self._step > self._policy.step_seconds:
            return f"the engine hangs: its step has taken {self._step:.0f} seconds"
        return None
