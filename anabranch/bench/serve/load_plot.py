"""Latency and throughput against load, as a picture."""

# pyright: reportUnknownMemberType=false, reportMissingTypeStubs=false

from __future__ import annotations

from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

from anabranch.bench.results import RunResults

LATENCIES = {"ttft": "time to first token, ms", "tpot": "time per output token, ms"}
DASHES = {"median": "-", "p99": "--"}


def check_matplotlib(path: Path | None) -> None:
    """Refuse a plot that could not be drawn, before the run."""
    if path is not None and find_spec("matplotlib") is None:
        raise ValueError(f"--plot {path} needs matplotlib: pip install 'anabranch[bench]'")


def draw_loads(results: RunResults, path: Path) -> None:
    """Three panels; a colour for each setting, dashes for the 99th percentile."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(15.6, 4.4), layout="constrained")
    panels: Any = drawing.subplots(1, 3)
    groups = groupby(results.rows, key=lambda row: row["setting"])
    for place, (setting, group) in enumerate(groups):
        rows = list(group)
        lines = {
            (panel, f"{setting}, {which}", dashes): f"{which}_{name}_ms"
            for panel, name in enumerate(LATENCIES)
            for which, dashes in DASHES.items()
        } | {(2, setting, "-"): "output_throughput"}
        for (panel, label, dashes), name in lines.items():
            points = [(row["max_concurrency"], row[name]) for row in rows if row[name] is not None]
            x, y = zip(*points, strict=True) if points else ((), ())
            style = {"color": f"C{place}", "marker": "o", "linestyle": dashes, "label": label}
            panels[panel].plot(x, y, **style)
    for axes, label in zip(panels, (*LATENCIES.values(), "output, tokens/s"), strict=True):
        axes.set(xlabel="concurrency", ylabel=label, ylim=(0, None))
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.grid(visible=True, alpha=0.3)
    handles, labels = panels[0].get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    drawing.suptitle(f"{results.rows[0]['model']}, {results.where}", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path)
