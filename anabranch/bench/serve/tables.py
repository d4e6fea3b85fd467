"""Runs beside each other: settings as columns, or loads as lines."""

from __future__ import annotations

from anabranch.bench.engine.run_results import Record, RunResults
from anabranch.bench.serve.block import format_value, notes, sections
from anabranch.bench.table import Table, format_number

COLUMNS = {
    "req/s": "request_throughput",
    "output tok/s": "output_throughput",
    "TTFT median": "median_ttft_ms",
    "p99": "p99_ttft_ms",
    "TPOT median": "median_tpot_ms",
    "p99 ": "p99_tpot_ms",
    "ITL median": "median_itl_ms",
    "failed": "failed",
}
READING = "Latencies in ms, of the requests that succeeded."


def side_by_side(results: RunResults) -> Table:
    """The lines of the result block, a column for each setting, and the last over the first."""
    rows = results.rows
    lines: list[list[str]] = []
    values = [{line: value for _, rows in sections(row) for line, value in rows} for row in rows]
    labels = dict.fromkeys(label for each in values for label in each)
    for label in labels:
        found = [each.get(label) for each in values]
        cells = ["" if value is None else format_value(value) for value in found]
        lines.append([label.rstrip(":"), *cells, _ratio(found[0], found[-1])])
    columns = ["", *(row["setting"] for row in rows), "last / first"]
    said = [f"{row['setting']}: {note}" for row in rows for note in notes(row)]
    return Table(f"{rows[0]['load']}, {results.where}", columns, lines, said)


def _ratio(first: object, last: object) -> str:
    if not isinstance(first, float) or not isinstance(last, float) or not first:
        return ""
    return f"{last / first:.2f}x"


def load_table(results: RunResults) -> Table:
    """A line for each load and setting."""
    settings = len({row["setting"] for row in results.rows}) > 1
    lines = [
        [
            *([row["setting"]] if settings else []),
            row["load"],
            *(_cell(row, key) for key in COLUMNS.values()),
        ]
        for row in results.rows
    ]
    head = [*(["setting"] if settings else []), "load", *(name.strip() for name in COLUMNS)]
    said = [
        f"{row['setting']}, {row['load']}: {note}" for row in results.rows for note in notes(row)
    ]
    return Table(f"serve, {results.where}", head, lines, [READING, *said])


def _cell(row: Record, key: str) -> str:
    value = row[key]
    if value is None:
        return "-"
    return format_number(value) if isinstance(value, float) else str(value)
