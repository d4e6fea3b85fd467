"""The engine's part of the README, from benchmarks/results/engine/."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path("benchmarks/results/engine")
Table = tuple[str, list[str], list[list[str]]]  # title, columns, lines


def engine_section(root: Path) -> str | None:
    """Tables of the results there are."""
    parts = [
        _part(path, TABLES[kind])
        for kind in TABLES
        for path in sorted((root / FOLDER).glob(f"*{kind}.json"))
    ]
    return "\n\n".join(parts) if parts else None


def _part(path: Path, make: Callable[[dict[str, Any]], Table]) -> str:
    results = json.loads(path.read_text())
    header = results["header"]
    title, columns, lines = make(results)
    versions = ", ".join(f"{name} {version}" for name, version in header["versions"].items())
    where = f"{header['device']}, {versions}; commit {header['commit']}, {header['date'][:10]}."
    rows = [_row(columns), _row(["---", *["---:"] * (len(columns) - 1)]), *map(_row, lines)]
    return "\n".join([title, "", *rows, "", where])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _latency(results: dict[str, Any]) -> Table:
    lines = [
        [row["case"], f"{row['ms_a_step']:.2f}", f"{row['prefill_ms']:.0f}", _stages(row)]
        for row in results["rows"]
    ]
    title = f"**Latency**, {results['options']['model']}, sequences x tokens:"
    return title, ["case", "ms a step, all decoding", "ms for all prompts", "stages, ms"], lines


def _stages(row: dict[str, Any]) -> str:
    return ", ".join(f"{name} {taken['median_ms']:.2f}" for name, taken in row["stages"].items())


def _scorers(results: dict[str, Any]) -> Table:
    plain = results["rows"][0]["ms"]
    lines = [
        [row["name"], str(row["tokens_a_sequence"]), f"{row['ms']:.1f}", f"{row['ms'] / plain:.2f}"]
        for row in results["rows"]
    ]
    options = results["options"]
    title = (
        f"**Scorers**, {options['model']}, {options['batch']} sequences of {options['context']} "
        "keys, one step in a graph:"
    )
    return title, ["step", "tokens a sequence", "ms", "to plain"], lines


def _throughput(results: dict[str, Any]) -> Table:
    ours = results["rows"][0]["output_tokens_s"]
    lines = [
        [
            row["name"],
            f"{row['requests_s']:.1f}",
            f"{row['output_tokens_s']:.0f}",
            f"{ours / row['output_tokens_s']:.2f}x",
        ]
        for row in results["rows"]
        if "error" not in row
    ]
    options = results["options"]
    title = (
        f"**Throughput**, {options['model']}, {options['num_prompts']} prompts of "
        f"{options['input_len']} tokens, {options['output_len']} out:"
    )
    return title, ["", "requests/s", "output tokens/s", "anabranch is"], lines


def _cpu(results: dict[str, Any]) -> Table:
    lines = [
        [row["ratio_of"], f"{row['ratio']:.2f}x"]
        if "ratio_of" in row
        else [row["name"], f"{row['tokens_s']:.1f} tokens/s"]
        for row in results["rows"]
    ]
    title = f"**CPU**, {results['options']['model']}, greedy, {results['options']['dtype']}:"
    return title, ["", "median"], lines


TABLES: dict[str, Callable[[dict[str, Any]], Table]] = {
    "latency": _latency,
    "scorers": _scorers,
    "throughput": _throughput,
    "cpu": _cpu,
}
