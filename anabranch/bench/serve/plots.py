"""Latency and throughput against load."""

# pyright: reportUnknownMemberType=false, reportMissingTypeStubs=false

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

from anabranch.bench.engine.run_results import Record, RunResults

LATENCIES = {"ttft": "time to first token, ms", "tpot": "time per output token, ms"}
STYLES = {"median": "-", "p99": "--"}


def draw_loads(results: RunResults, path: Path) -> None:
    """Three panels; a colour for each setting, dashes for the 99th percentile."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FormatStrFormatter

    from anabranch.bench.plots import COLOURS, MARKERS

    drawing = Figure(figsize=(15.6, 4.4), layout="constrained")
    panels: Any = drawing.subplots(1, 3)
    key = "request_rate" if results.options["sweep_over"] == "rate" else "max_concurrency"
    named = key == "max_concurrency"
    groups = groupby(results.rows, key=lambda row: row["setting"])
    for place, (setting, group) in enumerate(groups):
        rows = [row for row in group if row[key] is not None]  # a rate may be unlimited
        style = {"color": COLOURS[place % len(COLOURS)], "marker": MARKERS[place % len(MARKERS)]}
        for axes, name in zip(panels, LATENCIES, strict=False):
            for word, dashes in STYLES.items():
                label = f"{setting}, {word}"
                _line(axes, rows, key, f"{word}_{name}_ms", label=label, linestyle=dashes, **style)
        _line(panels[2], rows, key, "output_throughput", label=setting, **style)
    for axes, label in zip(panels, (*LATENCIES.values(), "output, tokens/s"), strict=True):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("requests under way at once" if named else "requests/s")
        axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, alpha=0.3)
    handles, labels = panels[0].get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    model = results.rows[0]["model"]
    drawing.suptitle(f"{model}, {results.where}", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path)


def _line(axes: Any, rows: list[Record], x: str, y: str, **style: Any) -> None:
    points = [(row[x], row[y]) for row in rows if row[y] is not None]
    axes.plot([x for x, _ in points], [y for _, y in points], **style)
