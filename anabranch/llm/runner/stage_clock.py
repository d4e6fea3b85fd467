"""How long the stages of a step took, by events on the device, read when the step is over."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch


class StageClock:
    """Times of named stages in milliseconds; measuring never waits for the device.

    On a GPU a stage is measured between two events of the stream. On a CPU work is done when a
    call returns, so the host's clock is right.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[str, Any, Any]] = []
        self.host_ms: dict[str, float] = {}  # beside the stages, which go on meanwhile

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        """Measure what is launched inside."""
        start = self._mark()
        yield
        self._marks.append((name, start, self._mark()))

    @contextmanager
    def host(self, name: str) -> Generator[None]:
        """Measure what the host does inside, beside the stages, by its own clock."""
        start = time.perf_counter()
        yield
        taken = 1e3 * (time.perf_counter() - start)
        self.host_ms[name] = self.host_ms.get(name, 0.0) + taken

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        """Until the last stage is over."""
        with self.host("waiting"):
            if self._on_gpu and self._marks:
                self._marks[-1][2].synchronize()

    def read(self) -> dict[str, float]:
        """Milliseconds by stage, all of which are over."""
        times: dict[str, float] = {}
        for name, start, stop in self._marks:
            taken = start.elapsed_time(stop) if self._on_gpu else (stop - start) * 1e3
            times[name] = times.get(name, 0.0) + taken
        self._marks.clear()
        return times
