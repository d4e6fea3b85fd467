"""How threads wait for each other: spinning on cores of their own, sleeping on shared ones.

GNU's OpenMP runtime, which torch brings, spins for milliseconds at every barrier. That is fastest
while the cores are free. When others use them, a thread spins away the time slice in which the one
it waits for could have run, and a step takes ten times as long. The runtime spins hardly at all
when there are more threads in teams than cores, so a second, idle team makes it sleep instead.
"""

from __future__ import annotations

import os
import resource
import threading
import time

import torch

from anabranch.kernels.cpu.native import native

PERIOD = 0.25  # seconds between looks
BUSY = 40  # preemptions a second from which cores are shared; time slices are 3 to 10 ms
FREE = 10  # and below which they are not


class CoreSharing:
    """Watches how often this process is preempted, and chooses how its threads wait."""

    def __init__(self) -> None:
        self.is_shared = False
        self._since = time.monotonic()
        self._count = preemptions()
        self._freed: threading.Event | None = None

    def observe(self) -> None:
        """Look again, if the last look was long enough ago."""
        now = time.monotonic()
        if now - self._since < PERIOD or native() is None:
            return
        count = preemptions()
        rate = (count - self._count) / (now - self._since)
        self._since, self._count = now, count
        if rate >= BUSY and not self.is_shared:
            self._hold()
        elif rate < FREE and self.is_shared:
            self.release()

    def _hold(self) -> None:
        self.is_shared, self._freed = True, threading.Event()
        ready = threading.Event()
        arguments = (self._freed, ready)
        threading.Thread(target=_hold, args=arguments, name="idle team", daemon=True).start()
        ready.wait()

    def release(self) -> None:
        if self._freed is not None:
            self._freed.set()
        self.is_shared, self._freed = False, None


def preemptions() -> int:
    """How often a thread of this process had to give its core to another process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def _hold(freed: threading.Event, ready: threading.Event) -> None:
    """A team that makes all teams together larger than the cores by one, until it is freed."""
    native().hold_team(max(len(os.sched_getaffinity(0)) - torch.get_num_threads(), 0) + 2)
    ready.set()
    freed.wait()
