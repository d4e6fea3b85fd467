"""How busy a machine is with other things: waiting that others cause is not the server's."""

from __future__ import annotations

import time

import psutil


class OthersLoad:
    """Cores that processes other than this one and its descendants take, from its making on."""

    def __init__(self) -> None:
        self._begin = time.monotonic(), _busy(), _own()

    def cores(self) -> float:
        """On average until now."""
        begin, busy, own = self._begin
        others = (_busy() - busy) - (_own() - own)
        return round(max(others, 0.0) / (time.monotonic() - begin), 2)


def _busy() -> float:
    """Seconds of all cores that were not idle."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0)


def _own() -> float:
    """Seconds of this process, of its descendants, and of those that have ended."""
    this, total = psutil.Process(), 0.0
    for each in [this, *this.children(recursive=True)]:
        try:
            total += sum(each.cpu_times()[:4])  # its own, and its ended children's
        except psutil.NoSuchProcess:
            continue
    return total
