"""The block of text that serving benchmarks print, as vLLM's readers know it."""

from __future__ import annotations

from collections.abc import Iterator

from anabranch.bench.engine.run_results import Record

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
PEAK = "max_concurrent_requests"  # a count that is written with decimals
HEADING = "Per-position acceptance (%):"
Value = float | int | str | None
Section = tuple[str, list[tuple[str, Value]]]


def sections(row: Record) -> Iterator[Section]:
    """Titles and lines of a run; the first has no title."""
    shown = {label: key for label, key in ROWS.items() if key not in IF_GIVEN or row[key]}
    yield (
        "",
        [(label, float(row[key]) if key == PEAK else row[key]) for label, key in shown.items()],
    )
    for name, title in LATENCIES.items():
        words = ("Mean", "Median", "P99")
        yield title, [(f"{w} {name.upper()} (ms):", row[f"{w.lower()}_{name}_ms"]) for w in words]
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
    """What a reader of the figures must know."""
    lines = [
        f"{failure['count']} failed with {kind}: {failure['said']}"
        for kind, failure in row["failures"].items()
    ]
    if cached := row["cached_input_tokens"]:
        lines.append(f"{cached} of the input tokens were in the server's prefix cache")
    if alone := row.get("engine"):
        lines.append(
            f"the engine alone: {alone['output_throughput']:.2f} output tok/s; "
            f"HTTP gives {alone['http_to_engine']:.3f} of that"
        )
    return lines
