"""python -m anabranch.bench.report: the README's tables and the plots, from benchmarks/results/.

Between `<!-- bench:NAME -->` and `<!-- /bench:NAME -->` stands what the newest results of that
benchmark give. `--check` writes nothing and fails where README.md says something else.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from anabranch.bench.cases import BENCHES
from anabranch.bench.engine.report import engine_section
from anabranch.bench.figures import figures_of
from anabranch.bench.results import Results, Row
from anabranch.bench.table import make_table

ROOT = Path(__file__).resolve().parents[2]
README_GROUPS = {"table", "models", "cpu"}  # sweeps are plotted


def newest_results(root: Path) -> dict[str, Results]:
    """The latest results of each benchmark; those of a GPU come before those of a CPU."""
    found = [Results.load(path) for path in sorted(root.glob("benchmarks/results/*.json"))]
    found = [results for results in found if results.header.bench in BENCHES]
    found.sort(key=lambda x: (not x.header.device.startswith("CPU"), x.header.date))
    return {results.header.bench: results for results in found}


def render(text: str, newest: dict[str, Results]) -> str:
    """The README with every marked section replaced; a benchmark without markers is not shown."""
    for bench, results in newest.items():
        text = _replace(text, bench, _section(results))
    return text


def _replace(text: str, name: str, section: str) -> str:
    pattern = re.compile(rf"(<!-- bench:{name} -->\n).*?(<!-- /bench:{name} -->)", re.DOTALL)
    return pattern.sub(lambda match: f"{match[1]}{section}\n{match[2]}", text)


def _section(results: Results) -> str:
    shown = [row for row in results.rows if _in_readme(row)] or results.rows
    table = make_table(replace(results, rows=shown))
    header = results.header
    versions = ", ".join(f"{name} {version}" for name, version in header.versions.items())
    driver = f", driver {header.driver}" if header.driver else ""
    lines = [
        _markdown_row(table.columns),
        _markdown_row(["---", *["---:"] * (len(table.columns) - 1)]),
        *map(_markdown_row, table.lines),
        "",
        f"{header.device}{driver}, {versions}; commit {header.commit}, {header.date[:10]}. "
        + " ".join(table.notes[:3]),
        "",
        *(f"![{figure.title}](docs/plots/{figure.name}.svg)" for figure in figures_of(results)),
    ]
    return "\n".join(lines).rstrip()


def _in_readme(row: Row) -> bool:
    if row.shape["bench"] == "merge":
        return row.shape["num_heads"] == 32
    return bool(README_GROUPS & set(row.shape["groups"]))


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _plots_in(text: str) -> list[str]:
    return re.findall(r"\((docs/plots/[\w-]+\.svg)\)", text)


def _draw(newest: dict[str, Results], folder: Path) -> None:
    if find_spec("matplotlib") is None:
        return print("no plots without matplotlib: pip install 'anabranch[bench]'", file=sys.stderr)
    from anabranch.bench.plots import draw_figures

    for results in newest.values():
        draw_figures(results, folder)


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Rewrite README.md and the plots, or check that README.md is up to date."""
    parser = argparse.ArgumentParser(prog="python -m anabranch.bench.report", description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare, exit 1 if stale")
    given = parser.parse_args(arguments)
    readme, newest = root / "README.md", newest_results(root)
    if not newest or not readme.exists():
        return 0
    old = readme.read_text()
    new = render(old, newest)
    engine = engine_section(root)
    if engine is not None:
        new = _replace(new, "engine", engine)
    if given.check:
        missing = [plot for plot in _plots_in(new) if not (root / plot).exists()]
        stale = old != new or bool(missing)
        if stale:
            print(f"README.md is not what benchmarks/results/ gives {missing}", file=sys.stderr)
            print("run python -m anabranch.bench.report", file=sys.stderr)
        return int(stale)
    readme.write_text(new)
    _draw(newest, root / "docs" / "plots")
    return 0


if __name__ == "__main__":
    sys.exit(main())
