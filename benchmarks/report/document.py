"""The documents whose marked sections are made from benchmarks/results/."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from attention_bench.case_results import Results, Row
from attention_bench.case_table import make_table
from attention_bench.cases import BENCHES
from attention_bench.grids import COMPOSITIONS
from drawn_table import drawn_section
from engine_tables import engine_section
from figures import figures_of
from headlines import headline_section
from hopper_table import hopper_section
from quantised_table import quantised_section

DOCUMENTS = ("README.md", "docs/benchmarks.md", "docs/weights.md")
TABLE_GROUPS = {"table", "models", "cpu"}  # the others are plotted


def newest_results(root: Path) -> dict[str, Results]:
    """The latest results of each attention benchmark, of a GPU rather than of a CPU."""
    found = [Results.load(path) for path in sorted(root.glob("benchmarks/results/*.json"))]
    found = [x for x in found if x.header.bench in (*BENCHES, *COMPOSITIONS)]
    found.sort(key=lambda x: (not x.header.device.startswith("CPU"), x.header.date))
    return {results.header.bench: results for results in found}


def sections_of(root: Path) -> dict[str, str]:
    """The text of each marked section that has results."""
    sections = {bench: _attention_section(x) for bench, x in newest_results(root).items()}
    others = (
        ("drawn", drawn_section),
        ("engine", engine_section),
        ("headlines", headline_section),
        ("hopper", hopper_section),
        ("quantised", quantised_section),
    )
    for name, make in others:
        if (text := make(root)) is not None:
            sections[name] = text
    return sections


def render(text: str, sections: dict[str, str]) -> str:
    """A document with its marked sections replaced."""
    for name, section in sections.items():
        pattern = re.compile(rf"(<!-- bench:{name} -->\n).*?(<!-- /bench:{name} -->)", re.DOTALL)
        text = pattern.sub(lambda match, new=section: f"{match[1]}{new}\n{match[2]}", text)
    return text


def rendered(root: Path) -> dict[Path, str]:
    """Every document there is, as it should be."""
    sections = sections_of(root)
    paths = [root / name for name in DOCUMENTS if (root / name).exists()]
    return {path: render(path.read_text(), sections) for path in paths}


def check(root: Path) -> int:
    """1 if a document is not what the results give, or names a plot that is not there."""
    stale = [path for path, text in rendered(root).items() if path.read_text() != text]
    missing = [
        path.parent / plot
        for path, text in rendered(root).items()
        for plot in re.findall(r"\(([\w/]*plots/[\w-]+\.svg)\)", text)
        if not (path.parent / plot).exists()
    ]
    for path in (*stale, *missing):
        print(f"{path.relative_to(root)} is not what benchmarks/results/ gives", file=sys.stderr)
    if stale or missing:
        print("run python benchmarks/report", file=sys.stderr)
    return int(bool(stale or missing))


def write(root: Path) -> int:
    """Rewrite the documents, and draw the plots if matplotlib is installed."""
    for path, text in rendered(root).items():
        path.write_text(text)
    if find_spec("matplotlib") is None:
        print("no plots without matplotlib: pip install 'anabranch[bench]'", file=sys.stderr)
        return 0
    from drawn_table import draw_ratios
    from figure_plots import draw_figures
    from tree_plot import draw_trees

    draw_trees(root)
    draw_ratios(root)
    for results in newest_results(root).values():
        draw_figures(results, root / "docs" / "plots")
    return 0


def _attention_section(results: Results) -> str:
    kept = [row for row in results.rows if _in_table(row)] or results.rows
    table = make_table(replace(results, rows=kept))
    header = results.header
    versions = ", ".join(f"{name} {version}" for name, version in header.versions.items())
    driver = f", driver {header.driver}" if header.driver else ""
    lines = [
        markdown_row(table.columns),
        markdown_row(["---", *["---:"] * (len(table.columns) - 1)]),
        *map(markdown_row, table.lines),
        "",
        f"{header.device}{driver}, {versions}; commit {header.commit}, {header.date[:10]}. "
        + " ".join(table.notes[:3]),
        "",
        *(f"![{figure.title}](plots/{figure.name}.svg)" for figure in figures_of(results)),
    ]
    return "\n".join(lines).rstrip()


def _in_table(row: Row) -> bool:
    if row.shape["bench"] == "merge":
        return row.shape["num_heads"] == 32 or "cached" in row.shape["groups"]
    return bool(TABLE_GROUPS & set(row.shape["groups"]))


def markdown_row(cells: Sequence[str]) -> str:
    """One line of a table."""
    return f"| {' | '.join(cells)} |"
