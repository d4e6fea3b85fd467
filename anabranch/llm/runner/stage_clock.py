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

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        """Measure what is launched inside."""
        start = self._mark()
        yield
        self._marks.append((name, start, self._mark()))

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read(self) -> dict[str, float]:
        """Milliseconds by stage; waits for the end of the last one."""
        times: dict[str, float] = {}
        if self._on_gpu and self._marks:
            self._marks[-1][2].synchronize()
        for name, start, stop in self._marks:
            taken = start.elapsed_time(stop) if self._on_gpu else (stop - start) * 1e3
            times[name] = times.get(name, 0.0) + taken
        self._marks.clear()
        return times
