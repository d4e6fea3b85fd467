"""Results of cases as a table: a line for each case, a column for each implementation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from statistics import median

from anabranch.llm.bench.table import Table, format_number
from attention_bench.case_results import Results, Row


def make_table(results: Results) -> Table:
    """All rows of a run. Rate, ceiling and speedup are those of our first implementation."""
    names = list(dict.fromkeys(row.implementation for row in results.rows))
    unit = results.rows[0].unit if results.rows else "GB/s"
    cases = groupby(results.rows, key=lambda row: row.case)
    return Table(
        title=f"{results.header.bench} on {results.header.device}",
        columns=["case", *names, "speedup", unit, "% of ceiling"],
        lines=[_line(list(rows), names) for _, rows in cases],
        notes=[*_reading(results), *_plans(results.rows), *_reasons(results.rows)],
    )


def _line(rows: list[Row], names: Sequence[str]) -> list[str]:
    by_name = {row.implementation: row for row in rows}
    cells = [_cell(by_name[name]) if name in by_name else "" for name in names]
    models = ", ".join(rows[0].shape["models"])
    head = f"{rows[0].case} ({models})" if models else rows[0].case
    rated = next((row for row in rows if row.role == "ours" and row.us is not None), None)
    if rated is None:
        return [head, *cells, "", "", ""]
    speedup = "" if rated.ratio is None else f"{rated.ratio:.2f}x"
    speedup += " torch" if rated.best_peer == "torch" else ""
    rate, percent = format_number(rated.rate), format_number(rated.percent_of_ceiling)
    return [head, *cells, speedup, rate, percent]


def _cell(row: Row) -> str:
    if row.us is None:
        return "-" if row.status == "unavailable" else row.status
    if row.shape["bench"] == "merge" and row.eager_us is not None:
        return f"{format_number(row.us)} / {format_number(row.eager_us)}"
    return format_number(row.us)


def _reading(results: Results) -> list[str]:
    header, ceilings = results.header, results.ceilings
    eager = " / called from Python" if header.bench == "merge" else ""
    times = f"Microseconds in a CUDA graph{eager}, inputs rotating past the L2 cache."
    if header.device.startswith("CPU"):
        times = "Microseconds, wall clock on a CPU; numbers of a GPU need a GPU."
    read, matmul = ceilings.read_gb_s, ceilings.matmul_tflop_s
    return [
        times,
        "Speedup: time of the best peer / ours; over torch where no peer is.",
        f"Measured ceilings: read {read:.0f} GB/s, matmul {format_number(matmul)} TFLOP/s.",
    ]


def _plans(rows: Sequence[Row]) -> list[str]:
    plans: dict[str, list[float]] = {}
    for row in rows:
        if row.plan_us is not None:
            plans.setdefault(row.implementation, []).append(row.plan_us)
    costs = ", ".join(f"{name} {format_number(median(us))}" for name, us in plans.items())
    note = f"Plan, once a step and not in the times, median microseconds: {costs}."
    return [note] if plans else []


def _reasons(rows: Sequence[Row]) -> list[str]:
    """Each reason once, with the number of cases that it holds for."""
    counts = Counter((x.implementation, x.status, x.note) for x in rows if x.status != "ok")
    return [f"{name} {status} in {n}: {note}" for (name, status, note), n in counts.items()]
