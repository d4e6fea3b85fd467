"""Signs of life of the engine's process, from a thread beside its steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

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
        """While a step runs."""
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
