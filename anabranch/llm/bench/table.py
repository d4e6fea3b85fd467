"""Results on the terminal as a table, and in a file as panels of lines."""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple


class Table(NamedTuple):
    """Cells of text, and what a reader must know to read them."""

    title: str
    columns: list[str]
    lines: list[list[str]]
    notes: list[str]


def format_number(value: float | None) -> str:
    """Three significant digits, without an exponent."""
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def print_paths(*paths: Path | None) -> None:
    for path in paths:
        if path is not None:
            print(f"written to {path}")


def print_table(table: Table) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable

    console = Console()
    if not console.is_terminal:  # a pipe has no width to fit into
        console.width = 240
    shown = RichTable(title=table.title, box=box.SIMPLE, title_justify="left")
    for i, column in enumerate(table.columns):
        shown.add_column(column, justify="right" if i else "left", overflow="fold")
    for line in table.lines:
        shown.add_row(*line)
    console.print(shown)
    for note in table.notes:
        console.print(note, style="dim", markup=False, highlight=False)


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
