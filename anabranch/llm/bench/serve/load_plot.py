"""Latency and throughput against load, as a picture."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from anabranch.llm.bench.line_plot import PlotLine, PlotPanel, draw_panels
from anabranch.llm.bench.run_results import Record, RunResults

# What a panel shows by its label: fields of a row, and how their lines are drawn.
PANELS = {
    "time to first token, ms": {"median_ttft_ms": "-", "p99_ttft_ms": "--"},
    "time per output token, ms": {"median_tpot_ms": "-", "p99_tpot_ms": "--"},
    "output, tokens/s": {"output_throughput": "-"},
}


def draw_loads(results: RunResults, path: Path) -> None:
    """Three panels; a colour for each setting, dashes for the 99th percentile."""
    groups = [
        (setting, list(rows))
        for setting, rows in groupby(results.rows, key=lambda row: row["setting"])
    ]
    panels = [
        PlotPanel("concurrency", label, [
            PlotLine(f"{setting}, {name.partition('_')[0]}", _points(rows, name), place, dashes)
            for place, (setting, rows) in enumerate(groups)
            for name, dashes in names.items()
        ])
        for label, names in PANELS.items()
    ]  # fmt: skip
    draw_panels(f"{results.rows[0]['model']}, {results.where}", panels, path)


def _points(rows: list[Record], name: str) -> list[tuple[float, float]]:
    return [(row["max_concurrency"], row[name]) for row in rows if row[name] is not None]
