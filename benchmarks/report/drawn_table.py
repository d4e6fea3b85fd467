"""Calls drawn at random beside their peers, from benchmarks/results/drawn/: a table and a plot."""

# pyright: reportUnknownMemberType=false, reportMissingTypeStubs=false

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from drawn_shapes import by_kind


def drawn_results(root: Path) -> dict[str, Any] | None:
    """The newest run; None without one."""
    found = [json.loads(path.read_text()) for path in root.glob("benchmarks/results/drawn/*.json")]
    return max(found, key=lambda results: results["header"]["date"], default=None)


def drawn_section(root: Path) -> str | None:
    """Ratios by kind; None without results."""
    results = drawn_results(root)
    if results is None:
        return None
    lines = ["| kind | calls | median | worst twentieth | worst |", "|---|---:|---:|---:|---:|"]
    lines += [
        f"| {kind} | {count} | {middle:.2f} | {low:.2f} | {worst:.2f} |"
        for kind, count, middle, low, worst in by_kind(results["rows"])
    ]
    header = results["header"]
    lines += [
        "",
        f"{header['device']}, torch {header['torch']}, triton {header['triton']}; "
        f"commit {header['commit'][:7]}, {header['date']}; seed {header['seed']}.",
        "",
        "![Ratios of drawn calls by kind](plots/drawn-calls.svg)",
    ]
    return "\n".join(lines)


def draw_ratios(root: Path) -> None:
    """docs/plots/drawn-calls.svg, if there are results: a dot for each call."""
    import matplotlib as mpl
    from figure_plots import COLOURS, STYLE
    from matplotlib.figure import Figure

    results = drawn_results(root)
    if results is None:
        return
    kinds = [each.kind for each in by_kind(results["rows"])][:-1]
    with mpl.rc_context(STYLE):
        drawing = Figure(figsize=(6.4, 3.6), layout="constrained")
        axes: Any = drawing.subplots()
        for place, kind in enumerate(kinds):
            ratios = sorted(row["ratio"] for row in results["rows"] if row["kind"] == kind)
            spread = [place + 0.5 * (i / max(len(ratios) - 1, 1) - 0.5) for i in range(len(ratios))]
            axes.plot(spread, ratios, "o", markersize=4, alpha=0.7, color=COLOURS[0])
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_yscale("log")
        axes.set_yticks([0.5, 0.7, 1, 1.5, 2, 3], ["0.5", "0.7", "1", "1.5", "2", "3"])
        axes.minorticks_off()
        axes.set_xticks(range(len(kinds)), kinds)
        axes.set_ylabel("time of the fastest peer / ours")
        axes.grid(visible=True, axis="y", alpha=0.3)
        drawing.savefig(root / "docs" / "plots" / "drawn-calls.svg", metadata={"Date": None})
