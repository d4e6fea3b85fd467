"""Panels of lines as a picture, for results against a load or a length."""

# pyright: reportUnknownMemberType=false, reportMissingTypeStubs=false

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple


class PlotLine(NamedTuple):
    """Points in the order in which they are joined."""

    label: str
    points: list[tuple[float, float]]
    colour: int  # of matplotlib's cycle
    dashes: str = "-"
    spread: list[float] | None = None  # of each point, up and down


class PlotPanel(NamedTuple):
    """One pair of axes."""

    x_label: str
    y_label: str
    lines: list[PlotLine]


def check_matplotlib(path: Path | None) -> None:
    """Refuse a plot that could not be drawn, before the run."""
    if path is not None and find_spec("matplotlib") is None:
        raise ValueError(f"--plot {path} needs matplotlib: pip install 'anabranch[bench]'")


def draw_panels(title: str, panels: Sequence[PlotPanel], path: Path) -> None:
    """Side by side, with one legend; the x axis is logarithmic, the y axis begins at 0."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(5.2 * len(panels), 4.4), layout="constrained")
    every: Any = drawing.subplots(1, len(panels), squeeze=False)[0]
    for axes, panel in zip(every, panels, strict=True):
        for line in panel.lines:
            x, y = zip(*line.points, strict=True) if line.points else ((), ())
            style = {"color": f"C{line.colour}", "marker": "o", "linestyle": line.dashes}
            axes.errorbar(x, y, line.spread, label=line.label, capsize=3, **style)
        axes.set(xlabel=panel.x_label, ylabel=panel.y_label, ylim=(0, None))
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.grid(visible=True, alpha=0.3)
    handles, labels = every[0].get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    drawing.suptitle(title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path)
