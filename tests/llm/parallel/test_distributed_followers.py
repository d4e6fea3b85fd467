"""Followers do what rank 0 sends; a rank that is killed ends the others, whatever they wait for."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from anabranch.llm.parallel.followers import EXIT_CODE, Followers

SCRIPT = Path(__file__).parents[2] / "support" / "leading_rank.py"
HANG_SECONDS = 120


def lead(what: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), what]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=HANG_SECONDS, check=False
    )


def assert_gone(pids: list[int]) -> None:
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(processes, timeout=HANG_SECONDS)
    assert not alive


@pytest.mark.parametrize("what", ["lose a follower", "die", "end"])
def test_ranks_end_together(what: str) -> None:
    """By a signal, or with the program; after a group was closed, and sums of all ranks."""
    run = lead(what)
    *sums, first, second = run.stdout.split()
    assert sums == ["30", "60"] * 2, run.stderr
    codes = {"lose a follower": EXIT_CODE, "die": -signal.SIGKILL, "end": 0}
    assert run.returncode == codes[what], run.stderr
    if what == "lose a follower":
        assert f"rank 2 ended with exit code {-signal.SIGKILL}" in run.stderr
    assert_gone([int(first), int(second)])


def test_no_ranks() -> None:
    with pytest.raises(ValueError, match="num_ranks must be at least 1, got 0"):
        Followers(0, print, backend="gloo")
