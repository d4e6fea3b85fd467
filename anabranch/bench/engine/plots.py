"""Pictures of engine benchmarks."""

# pyright: reportUnknownMemberType=false, reportMissingTypeStubs=false

from __future__ import annotations

from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

from anabranch.bench.engine.run_results import Record, RunResults


def check_matplotlib(path: Path | None) -> None:
    """Refuse a plot that could not be drawn, before the run."""
    if path is not None and find_spec("matplotlib") is None:
        raise ValueError(f"--plot {path} needs matplotlib: pip install 'anabranch[bench]'")


def draw_sweep(results: RunResults, path: Path) -> None:
    """Tokens/s against context: prompts on the left, generation on the right."""
    from anabranch.bench.plots import COLOURS, MARKERS

    drawing, panels = _figure(2, f"{results.options['model']}, {results.where}")
    names = list(dict.fromkeys(row["implementation"] for row in results.rows))
    for axes, kind, title in zip(panels, ("pp", "tg"), ("prompt", "generation"), strict=True):
        rows = [row for row in results.rows if row["test"].startswith(kind) and "tokens_s" in row]
        for name, group in groupby(rows, key=lambda row: row["implementation"]):
            place = names.index(name)
            colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
            _line(axes, list(group), label=name, color=colour, marker=marker)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("context, tokens")
        axes.set_ylabel(f"{title}, tokens/s")
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, alpha=0.3)
    panels[0].legend(frameon=False)
    _save(drawing, path)


def _line(axes: Any, rows: list[Record], **style: Any) -> None:
    axes.errorbar(
        [row["context"] for row in rows],
        [row["tokens_s"] for row in rows],
        yerr=[row["spread"] for row in rows],
        capsize=3,
        **style,
    )


def draw_latency(results: RunResults, path: Path) -> None:
    """How many of the runs took at most how long, for each setting."""
    drawing, (axes,) = _figure(1, f"{results.options['model']}, {results.where}")
    for row in results.rows:
        axes.ecdf(row["latencies"], label=row["setting"])
    axes.set_xlabel("latency, seconds")
    axes.set_ylabel("share of runs")
    axes.legend(frameon=False)
    _save(drawing, path)


def _figure(num_panels: int, title: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(5.2 * num_panels, 4.4), layout="constrained")
    panels: Any = drawing.subplots(1, num_panels, squeeze=False)[0]
    drawing.suptitle(title, fontsize=11)
    return drawing, panels


def _save(drawing: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path)
