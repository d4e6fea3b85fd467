"""Tables on the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


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
    """Report the files that were written."""
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
