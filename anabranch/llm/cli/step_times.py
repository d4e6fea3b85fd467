"""Times of each step of an engine, stage by stage."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from anabranch.llm.engine.stats import EngineStats

if TYPE_CHECKING:
    from anabranch.llm.engine.llm import LLM

STAGES = ("catch-up", "proposal", "model", "scoring", "sampling", "verification")


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Milliseconds of the stages of one step, and when its results were there."""

    landed: float  # seconds of time.monotonic, as in RequestTimes
    stages: dict[str, float]

    @property
    def total_ms(self) -> float:
        """Of all stages."""
        return sum(self.stages.values())


@dataclass(slots=True)
class RecordedStats(EngineStats):
    """An engine's counts that keep every step's times."""

    steps: list[StepTimes] = field(default_factory=list[StepTimes])

    def add_times(self, times: dict[str, float]) -> None:
        """Of one step."""
        EngineStats.add_times(self, times)
        self.steps.append(StepTimes(time.monotonic(), dict(times)))

    def stage_summary(self) -> dict[str, dict[str, float]]:
        """Steps, their mean and median milliseconds, of each stage that ran."""
        summary: dict[str, dict[str, float]] = {}
        for stage in STAGES:
            taken = [step.stages[stage] for step in self.steps if stage in step.stages]
            if taken:
                mean = sum(taken) / len(taken)
                summary[stage] = {"steps": len(taken), "mean_ms": mean, "median_ms": median(taken)}
        return summary


def record_steps(llm: LLM) -> RecordedStats:
    """Make an engine count from zero, and keep the times of every step."""
    stats = RecordedStats()
    llm.engine.stats = stats
    return stats
