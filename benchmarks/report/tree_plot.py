"""Draws tokens a verification, of trees and of chains, against the number of drafts."""

# pyright: reportUnknownMemberType=false, reportMissingTypeStubs=false

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import matplotlib as mpl
from figure_plots import COLOURS, MARKERS, STYLE
from matplotlib.figure import Figure


def draw_trees(root: Path) -> None:
    """docs/plots/tree-drafts.svg, if there are results; bars are standard errors of the mean."""
    for path in sorted(root.glob("benchmarks/results/engine/*tree.json")):
        results: dict[str, Any] = json.loads(path.read_text())
        with mpl.rc_context(STYLE):
            drawing = Figure(figsize=(5.2, 4.0), layout="constrained")
            axes: Any = drawing.subplots()
            for i, name in enumerate(("chain", "tree")):
                rows: list[dict[str, Any]] = results["rows"][i::2]
                samples: list[list[float]] = [row["samples"] for row in rows]
                errors = [stdev(values) / len(values) ** 0.5 for values in samples]
                sizes, means = [row["drafts"] for row in rows], [mean(x) for x in samples]
                style = {"color": COLOURS[i], "marker": MARKERS[i], "capsize": 4, "label": name}
                axes.errorbar(sizes, means, yerr=errors, **style)
            axes.set(xlabel="drafts of a verification", ylabel="tokens a verification")
            axes.set_ylim(1, None)
            axes.grid(visible=True, alpha=0.3)
            axes.legend(frameon=False, loc="lower right")
            drawing.suptitle(f"{results['options']['model']}, n-grams", fontsize=11)
            drawing.savefig(root / "docs" / "plots" / "tree-drafts.svg", metadata={"Date": None})
