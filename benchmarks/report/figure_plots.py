"""Draws the figures as SVG files: the same bytes from the same results and matplotlib."""

# pyright: reportUnknownMemberType=false, reportMissingTypeStubs=false

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from attention_bench.case_results import Results, Row
from figures import Figure, figures_of
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

# Okabe and Ito: distinct for every kind of colour vision; markers distinguish them in grey.
COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "osD^vP*X"
STYLE: Any = {"svg.hashsalt": "anabranch", "svg.fonttype": "none", "font.size": 11}


def draw_figures(results: Results, folder: Path) -> list[Path]:
    """Every figure that the results can fill."""
    folder.mkdir(parents=True, exist_ok=True)
    return [_draw(figure, results, folder) for figure in figures_of(results)]


def _draw(figure: Figure, results: Results, folder: Path) -> Path:
    path, lines = folder / f"{figure.name}.svg", figure.lines(results)
    with mpl.rc_context(STYLE):
        drawing = Drawing(figsize=(5.2 * len(figure.panels), 4.4), layout="constrained")
        panels = drawing.subplots(1, len(figure.panels), squeeze=False)[0]
        for axes, (name, label) in zip(panels, figure.panels, strict=True):
            for i, (implementation, rows) in enumerate(lines.items()):
                _line(axes, i, implementation, figure.x, name, rows)
            _label(axes, figure, label, lines)
            values = [getattr(row, name) for rows in lines.values() for row in rows]
            if name == "us" and max(values) > 10 * min(values):
                _scale_decades(axes)
            else:
                axes.set_ylim(0, 1.05 * max(values))
        drawing.suptitle(f"{figure.title}\n{results.header.device}", fontsize=11)
        handles, labels = panels[0].get_legend_handles_labels()
        drawing.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
        drawing.savefig(path, metadata={"Date": None})
    return path


def _line(axes: Any, i: int, label: str, x: str, name: str, rows: list[Row]) -> None:
    axes.plot(
        [row.shape[x] for row in rows],
        [getattr(row, name) for row in rows],
        label=label,
        color=COLOURS[i % len(COLOURS)],
        marker=MARKERS[i % len(MARKERS)],
        markersize=5,
        linewidth=2 if rows[0].role == "ours" else 1.2,
        linestyle="-" if rows[0].role == "ours" else "--",
    )


def _label(axes: Any, figure: Figure, label: str, lines: dict[str, list[Row]]) -> None:
    ticks = sorted({row.shape[figure.x] for rows in lines.values() for row in rows})
    near = [b < 1.4 * a for a, b in zip([0, *ticks], ticks, strict=False)]
    names = ["" if crowded else _short(tick) for tick, crowded in zip(ticks, near, strict=True)]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, names, fontsize=9)
    axes.minorticks_off()
    axes.set_xlabel(figure.x_label)
    axes.set_ylabel(label)
    axes.grid(visible=True, which="major", alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _scale_decades(axes: Any) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _short(number: int) -> str:
    return f"{number // 1024}k" if number >= 1024 and number % 1024 == 0 else str(number)
