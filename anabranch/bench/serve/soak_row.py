"""What a soak found, as a row and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from anabranch.bench.engine.run_results import Record, RunResults
from anabranch.bench.serve.outcome import Outcome
from anabranch.bench.serve.summary import count_failures, latencies
from anabranch.bench.table import Table


@dataclass(slots=True)
class Tally:
    """What was seen."""

    answered: list[Outcome] = field(default_factory=list[Outcome])  # or failed
    vanished: int = 0
    health: list[float] = field(default_factory=list[float])  # seconds
    unhealthy: int = 0
    memory: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    usage: list[float] = field(default_factory=list[float])


def soak_row(tally: Tally, seconds: float) -> Record:
    """Counts, rates and, in milliseconds, latencies."""
    good = [each for each in tally.answered if each.failure is None]
    num_output = sum(each.num_output for each in good)
    early, late = _halves(tally.memory)
    return {
        "completed": len(good),
        "vanished": tally.vanished,
        "failed": len(tally.answered) - len(good),
        "failures": count_failures(tally.answered),
        "duration": seconds,
        "total_output_tokens": num_output,
        "output_throughput": num_output / seconds,
        **latencies("ttft", [each.ttft for each in good]),
        **latencies("e2el", [each.latency for each in good]),
        "health_requests": len(tally.health),
        "unhealthy": tally.unhealthy,
        **latencies("health", tally.health),
        "max_health_ms": 1e3 * max(tally.health, default=0.0),
        "kv_usage_peak": max(tally.usage, default=0.0),
        "memory_mib_early": early,
        "memory_mib_late": late,
    }


def _halves(memory: Sequence[tuple[float, float]]) -> tuple[float | None, float | None]:
    """The most memory in the first and in the second half of the time, when all was warm."""
    if not memory:
        return None, None
    middle = (memory[0][0] + memory[-1][0]) / 2
    early = [size for moment, size in memory if moment <= middle]
    return max(early), max((size for moment, size in memory if moment > middle), default=None)


def soak_table(results: RunResults) -> Table:
    """The row, line by line."""
    (row,) = results.rows
    lines = [[name.replace("_", " "), _shown(value)] for name, value in row.items()]
    return Table(f"soak, {results.where}", ["", ""], lines, [])


def _shown(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
