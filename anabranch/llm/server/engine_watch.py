"""Signs of life of the engine's process: sent beside its steps, and missed when it hangs."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from anabranch.llm.server.messages import Beat

BEAT_SECONDS = 1.0


class Heartbeat:
    """Sends how long the step under way has taken, until the process ends."""

    def __init__(self, send: Callable[[Beat], None]) -> None:
        self._send = send
        self._began: float | None = None  # seconds of time.monotonic
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    @contextmanager
    def step(self) -> Generator[None]:
        self._began = time.monotonic()
        try:
            yield
        finally:
            self._began = None

    def _run(self) -> None:
        while True:
            began = self._began
            self._send(Beat(0.0 if began is None else time.monotonic() - began))
            time.sleep(BEAT_SECONDS)


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

    Only time in which the watching process runs counts: while it is suspended, messages wait
    unread, and the engine is not to blame.
    """

    def __init__(self, policy: HangPolicy) -> None:
        self._policy = policy
        self._begun = False
        self._silent = self._step = 0.0  # seconds

    def hear(self, message: Any) -> None:
        """Note a message of any kind."""
        self._begun, self._silent = True, 0.0
        if isinstance(message, Beat):
            self._step = message.step_seconds

    def pass_time(self, seconds: float) -> str | None:
        """Let time pass; the reason if the engine then counts as dead."""
        self._silent += seconds if self._begun else 0.0
        if self._silent > self._policy.silence_seconds:
            return f"the engine hangs: it has sent nothing for {self._silent:.0f} seconds"
        if self._step > self._policy.step_seconds:
            return f"the engine hangs: its step has taken {self._step:.0f} seconds"
        return None
