"""Times of each step of an engine, a torch profiler trace, and a picture of the stages."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile

from anabranch.llm.cli.progress import Progress
from anabranch.llm.engine.stats import EngineStats

if TYPE_CHECKING:
    from anabranch.llm.engine.llm import LLM

STAGES = ("catch-up", "proposal", "model", "scoring", "sampling", "verification")
TRACE, TIMELINE = "trace.json", "timeline.svg"
# Okabe and Ito, as in the other plots
COLOURS: dict[str, str] = dict(
    zip(STAGES, ("#56B4E9", "#E69F00", "#0072B2", "#009E73", "#CC79A7", "#D55E00"), strict=True)
)
MAX_STEPS = 400  # in the picture; the trace holds all


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Milliseconds of the stages of one step, and when its results were there."""

    landed: float  # seconds of time.monotonic, as in RequestTimes
    stages: dict[str, float]

    @property
    def total_ms(self) -> float:
        return sum(self.stages.values())


@dataclass(slots=True)
class RecordedStats(EngineStats):
    """An engine's counts that keep every step's times."""

    steps: list[StepTimes] = field(default_factory=list[StepTimes])

    def add_times(self, times: dict[str, float]) -> None:
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


@contextmanager
def profiled(llm: LLM, folder: Path, progress: Progress | None = None) -> Generator[RecordedStats]:
    """Write `trace.json` (for chrome://tracing or Perfetto) and `timeline.svg` about the block."""
    folder.mkdir(parents=True, exist_ok=True)
    activities = [ProfilerActivity.CPU]
    if llm.engine.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    before = llm.engine.stats
    stats = record_steps(llm)
    if progress:
        progress("profiling", 0, 0)
    try:
        with profile(activities=activities) as profiler:
            yield stats
            if llm.engine.device.type == "cuda":
                torch.cuda.synchronize()
    finally:
        llm.engine.stats = before
    if progress:
        progress(f"writing {folder / TRACE}", 0, 0)
    profiler.export_chrome_trace(str(folder / TRACE))
    draw_timeline(stats.steps, folder / TIMELINE)


def place_stages(steps: Sequence[StepTimes]) -> list[tuple[str, float, float]]:
    """Stage, start and length in ms. A step ends when its results were there, if not before."""
    bars: list[tuple[str, float, float]] = []
    if not steps:
        return bars
    origin = 1e3 * steps[0].landed - steps[0].total_ms
    free = 0.0  # when the step before was over
    for step in steps:
        start = max(free, 1e3 * step.landed - origin - step.total_ms)
        for stage in STAGES:
            if stage in step.stages:
                bars.append((stage, start, step.stages[stage]))
                start += step.stages[stage]
        free = start
    return bars


def draw_timeline(steps: Sequence[StepTimes], path: Path) -> bool:
    """Stages as bars over time, and the milliseconds of every step; False without matplotlib."""
    if find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    shown = list(steps[:MAX_STEPS])
    drawing = Figure(figsize=(12, 5), layout="constrained")
    upper, lower = drawing.subplots(2, 1)
    _draw_bars(upper, place_stages(shown))
    _draw_steps(lower, shown)
    handles, labels = lower.get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside lower center", ncols=len(STAGES), frameon=False)
    drawing.savefig(path)
    return True


def _draw_bars(axes: Any, bars: Sequence[tuple[str, float, float]]) -> None:
    present = [stage for stage in STAGES if any(bar[0] == stage for bar in bars)]
    for row, stage in enumerate(present):
        spans = [(start, length) for name, start, length in bars if name == stage]
        axes.broken_barh(spans, (row - 0.4, 0.8), color=COLOURS[stage], linewidth=0)
    axes.set_yticks(range(len(present)), present)
    axes.invert_yaxis()
    axes.set_xlabel("ms; a gap is time in which no stage ran")


def _draw_steps(axes: Any, steps: Sequence[StepTimes]) -> None:
    bottoms = [0.0] * len(steps)
    for stage in STAGES:
        heights = [step.stages.get(stage, 0.0) for step in steps]
        if any(heights):
            axes.bar(range(len(steps)), heights, 1.0, bottoms, color=COLOURS[stage], label=stage)
            bottoms = [a + b for a, b in zip(bottoms, heights, strict=True)]
    axes.set_xlabel("step")
    axes.set_ylabel("ms")
    if bottoms:  # the prompt's step is far longer than the others
        axes.set_ylim(0, 1.5 * sorted(bottoms)[int(0.95 * (len(bottoms) - 1))])
