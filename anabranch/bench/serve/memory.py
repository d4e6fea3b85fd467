"""Memory of a process and of those it started, as Linux tells it."""

from __future__ import annotations

from pathlib import Path


def memory_mib(pid: int) -> float | None:
    """Resident MiB, or None where there is no such process or no /proc."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return None
    lines = [line for line in status.splitlines() if line.startswith("VmRSS:")]
    own = int(lines[0].split()[1]) / 1024 if lines else 0.0
    return own + sum(memory_mib(int(child)) or 0.0 for child in children)
