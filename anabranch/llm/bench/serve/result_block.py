"""Results of `bench serve`: the block that vLLM prints, tables of several runs, and a picture."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from anabranch.llm.bench.run_results import Record, RunResults
from anabranch.llm.bench.table import PlotLine, PlotPanel, Table, draw_panels

WIDTH = 50
ROWS = {
    "Successful requests:": "completed",
    "Failed requests:": "failed",
    "Maximum request concurrency:": "max_concurrency",
    "Request rate configured (RPS):": "request_rate",
    "Benchmark duration (s):": "duration",
    "Total input tokens:": "total_input_tokens",
    "Total generated tokens:": "total_output_tokens",
    "Request throughput (req/s):": "request_throughput",
    "Output token throughput (tok/s):": "output_throughput",
    "Peak output token throughput (tok/s):": "max_output_tokens_per_s",
    "Peak concurrent requests:": "max_concurrent_requests",
    "Total token throughput (tok/s):": "total_token_throughput",
}
IF_GIVEN = ("max_concurrency", "request_rate")
LATENCIES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
}
SPECULATION = {
    "Acceptance rate (%):": "acceptance_rate",
    "Acceptance length:": "acceptance_length",
    "Drafts:": "num_drafts",
    "Draft tokens:": "draft_tokens",
    "Accepted tokens:": "accepted_tokens",
}
PEAK = "Peak concurrent requests:"  # a count that is written with decimals
HEADING = "Per-position acceptance (%):"
Value = float | int | str | None
Section = tuple[str, list[tuple[str, Value]]]
# What a panel shows by its label: fields of a row, and how their lines are drawn.
PANELS = {
    "time to first token, ms": {"median_ttft_ms": "-", "p99_ttft_ms": "--"},
    "time per output token, ms": {"median_tpot_ms": "-", "p99_tpot_ms": "--"},
    "output, tokens/s": {"output_throughput": "-"},
}


def sections(row: Record) -> Iterator[Section]:
    """Titles and lines of a run; the first has no title."""
    given = {label: row[key] for label, key in ROWS.items() if key not in IF_GIVEN or row[key]}
    given[PEAK] = float(given[PEAK])
    yield "", list(given.items())
    for name, title in LATENCIES.items():
        kinds = ("Mean", "Median", "P99")
        yield title, [(f"{k} {name.upper()} (ms):", row[f"{k.lower()}_{name}_ms"]) for k in kinds]
    drafted: Record | None = row.get("speculation")
    if drafted is None:
        return
    lines: list[tuple[str, Value]] = [(label, drafted[key]) for label, key in SPECULATION.items()]
    if positions := drafted["per_position_acceptance"]:
        lines += [(HEADING, ""), *((f"  Position {i}:", each) for i, each in enumerate(positions))]
    yield "Speculative Decoding", lines


def result_block(row: Record) -> str:
    """The block, and the reasons for failures below it."""
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}"]
    for title, rows in sections(row):
        lines += [f"{title:-^{WIDTH}}"] if title else []
        lines += [
            label if value == "" else f"{label:<40} {format_value(value):<10}"
            for label, value in rows
        ]
    return "\n".join([*lines, "=" * WIDTH, *notes(row)])


def format_value(value: Value) -> str:
    """Two decimals, of an integer none."""
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def notes(row: Record) -> list[str]:
    """Failures, and input that was not computed."""
    lines = [
        f"{failure['count']} failed with {kind}: {failure['said']}"
        for kind, failure in row["failures"].items()
    ]
    if cached := row["cached_input_tokens"]:
        lines.append(f"{cached} of the input tokens were in the server's prefix cache")
    return lines


def serve_report(results: RunResults) -> str | Table:
    """A block for a single run, else a table with a column for each."""
    return result_block(results.rows[0]) if len(results.rows) == 1 else side_by_side(results)


def side_by_side(results: RunResults) -> Table:
    """The lines of the block, a column for each run, and the last over the first."""
    rows = results.rows
    names = [_distinction(row, rows) for row in rows]
    values = [dict(line for _, lines in sections(row) for line in lines) for row in rows]
    lines: list[list[str]] = []
    for label in dict.fromkeys(label for each in values for label in each):
        found = [each.get(label) for each in values]
        cells = ["" if value is None else format_value(value) for value in found]
        lines.append([label.rstrip(":"), *cells, _ratio(found[0], found[-1])])
    remarks = [
        f"{name}: {note}" for name, row in zip(names, rows, strict=True) for note in notes(row)
    ]
    return Table(f"serve, {results.where}", ["", *names, "last / first"], lines, remarks)


def _distinction(row: Record, rows: list[Record]) -> str:
    """What distinguishes a run from the others: its setting, its load, or both."""
    several = [key for key in ("setting", "load") if len({each[key] for each in rows}) > 1]
    return ", ".join(row[key] for key in several or ["setting"])


def _ratio(first: object, last: object) -> str:
    if not isinstance(first, float) or not isinstance(last, float) or not first:
        return ""
    return f"{last / first:.2f}x"


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
