"""Tables of the engine and the server, from benchmarks/results/."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from anabranch.llm.bench.table import format_number

FOLDER = Path("benchmarks/results")
Table = tuple[str, list[str], list[list[str]]]  # title, columns, lines


def engine_section(root: Path) -> str | None:
    """Tables of the results there are."""
    parts = [
        _part(path, TABLES[kind])
        for kind in TABLES
        for path in sorted((root / FOLDER).glob(f"{kind}.json"))
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
        [row["case"], _number(row["ms_a_step"]), f"{row['prefill_ms']:.0f}", _stages(row)]
        for row in results["rows"]
    ]
    settings = {row["setting"] for row in results["rows"]} - {"plain"}
    title = (
        f"**Latency**, {', '.join([results['options']['model'], *settings])}, sequences x tokens:"
    )
    return title, ["case", "ms a step, all decoding", "ms for all prompts", "stages, ms"], lines


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


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
        [
            row["ratio_of"],
            f"{row['ratio']:.2f}x" + ("" if row["ratio"] >= row["bar"] else " (missed)"),
        ]
        if "ratio_of" in row
        else [row["name"], f"{row['tokens_s']:.1f} tokens/s"]
        for row in results["rows"]
    ]
    title = f"**CPU**, {results['options']['model']}, greedy, {results['options']['dtype']}:"
    return title, ["", "median"], lines


def _serve(results: dict[str, Any]) -> Table:
    names = ("output_throughput", "median_ttft_ms", "median_tpot_ms", "median_itl_ms")
    lines = [
        [row["load"].rpartition(",")[0], row["setting"], *(_number(row[name], 1) for name in names)]
        for row in sorted(results["rows"], key=lambda row: row["total_input_tokens"])
    ]
    options = results["options"]
    title = (
        f"**Serving**, {results['rows'][0]['model']}, {options['num_prompts']} requests, "
        f"{options['concurrency']} at once, through HTTP:"
    )
    columns = ["load", "setting", "output tokens/s", "TTFT, ms", "TPOT, ms", "ITL, ms"]
    return title, columns, lines


def _tree(results: dict[str, Any]) -> Table:
    rows, lines = results["rows"], list[list[str]]()
    for chain, tree in zip(rows[::2], rows[1::2], strict=True):
        gains = [b / a for a, b in zip(chain["samples"], tree["samples"], strict=True)]
        more, fewer = sum(gain > 1 for gain in gains), sum(gain < 1 for gain in gains)
        cells = [_spread(values, 2) for values in (chain["samples"], tree["samples"])]
        lines.append([str(chain["drafts"]), *cells, _spread(gains, 3), f"{more}, {fewer}"])
    options = results["options"]
    title = (
        f"**Draft trees**, {options['model']}, n-grams, width {options['tree_width']}: tokens a "
        f"verification over {len(rows[0]['samples'])} answers, mean ± standard deviation:"
    )
    return title, ["drafts", "chain", "tree", "ratio", "answers with more, fewer"], lines


def _spread(values: Sequence[float], digits: int) -> str:
    return f"{mean(values):.{digits}f} ± {stdev(values):.{digits}f}"


def _soak(results: dict[str, Any]) -> Table:
    options = results["options"]
    names = ("completed", "vanished", "failed", "kv_usage_end")
    lines = [
        [
            *(f"{row[name]:g}" for name in names),
            f"{_number(row['median_health_ms'], 1)} / {_number(row['p99_health_ms'], 1)}",
            f"{_number(row['memory_mib_early'], 0)} / {_number(row['memory_mib_late'], 0)}",
        ]
        for row in results["rows"]
    ]
    title = (
        f"**Soak**, {options['model']}, {options['clients']} clients for {options['seconds']:g} s, "
        f"{options['vanish']:.0%} vanishing:"
    )
    columns = ["completed", "vanished", "failed", "KV usage at the end"]
    health = "/health p50 / p99, ms"
    return title, [*columns, health, "memory, first / second half, MiB"], lines


def _ways(results: dict[str, Any]) -> Table:
    off, options = results["rows"][0]["ms_a_step"], results["options"]
    lines = [
        [row["name"], f"{row['ms_a_step']:.2f}", f"{off / row['ms_a_step']:.2f}x"]
        for row in results["rows"]
    ]
    shared = f"{options['shared']} shared and " if options["shared"] else ""
    kept = f", {options['keep']} kept" if options["way"] == "sparse" else ""
    title = (
        f"**Decode steps, {options['way']}**, {options['model']}, {options['batch']} sequences of "
        f"{shared}{options['own']} own tokens{kept}:"
    )
    return title, ["", "ms a step", "speed"], lines


def _accuracy(results: dict[str, Any]) -> Table:
    lines = [
        [row["method"], str(row["keep"]), f"{row['same_token']:.0%}", f"{row['perplexity']:.2f}"]
        for row in results["rows"]
    ]
    options, positions = results["options"], results["rows"][0]["positions"]
    title = (
        f"**Accuracy of sparse decoding**, {options['model']}, {positions} positions in the second "
        f"half of {options['context']} tokens of this repository's documents:"
    )
    return title, ["method", "keys kept", "same next token as dense", "perplexity"], lines


def _sweep(results: dict[str, Any]) -> Table:
    rows, options = results["rows"], results["options"]
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    found = {(row["test"], row["implementation"]): row for row in rows}
    tests = sorted(dict.fromkeys(row["test"] for row in rows), key=lambda test: test[:2])
    lines = [[test, *(_speed(found[test, name]) for name in names)] for test in tests]
    runs = "one run" if options["repeats"] == 1 else f"mean and spread of {options['repeats']} runs"
    title = (
        f"**Speed against context**, {options['model']}, tokens/s of prompts (pp) and of "
        f"{options['generate']} tokens after them (tg), {runs}:"
    )
    return title, ["", *names], lines


def _speed(row: dict[str, Any]) -> str:
    speed = format_number(row["tokens_s"])
    return f"{speed} ± {row['spread']:.2g}" if row["spread"] else speed


TABLES: dict[str, Callable[[dict[str, Any]], Table]] = {
    "engine/*latency": _latency,
    "engine/*draft": _latency,
    "engine/*scorers": _scorers,
    "engine/*throughput": _throughput,
    "engine/*-ways": _ways,
    "engine/*sweep": _sweep,
    "engine/*sparse-accuracy": _accuracy,
    "serve/*merge": _serve,
    "serve/*scorers": _serve,
    "engine/cpu": _cpu,
    "engine/*tree": _tree,
    "serve/*[!r]-soak": _soak,  # those of server-soak have rows of other kinds
}
