"""What a run of cases found: a row for each implementation in each case, and their JSON file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from anabranch.llm.bench.run_results import Header, save_rows
from attention_bench.cases import Case
from attention_bench.ceilings import Ceilings
from attention_bench.implementations import Implementation

Status = Literal["ok", "wrong", "unavailable", "failed"]


@dataclass(frozen=True, slots=True)
class Row:
    """One implementation in one case."""

    case: str
    shape: dict[str, Any]  # the fields of the case
    implementation: str
    role: str
    status: Status
    note: str = ""  # why it was not timed
    error: float | None = None  # of `out`, relative to its norm
    us: float | None = None  # in a CUDA graph on a GPU, wall clock on a CPU
    spread: float | None = None
    eager_us: float | None = None  # called from Python, on a GPU
    plan_us: float | None = None  # once a step
    rate: float | None = None
    unit: str = "GB/s"
    percent_of_ceiling: float | None = None
    ratio: float | None = None  # time of the best peer / this time
    best_peer: str | None = None


@dataclass(frozen=True, slots=True)
class Results:
    """A run of one benchmark."""

    header: Header
    ceilings: Ceilings
    rows: list[Row]

    def save(self, path: Path) -> None:
        head = asdict(self.header) | {"ceilings": asdict(self.ceilings)}
        save_rows(path, head, list(map(asdict, self.rows)))

    @staticmethod
    def load(path: Path) -> Results:
        content = json.loads(path.read_text())
        head: dict[str, Any] = content["header"]
        ceilings = Ceilings(**head.pop("ceilings"))
        return Results(Header(**head), ceilings, [Row(**row) for row in content["rows"]])


def blank_row(case: Case, implementation: Implementation, status: Status, note: str = "") -> Row:
    unit = "TFLOP/s" if case.bench == "prefill" else "GB/s"
    shape = json.loads(json.dumps(asdict(case)))  # as a file gives it back
    names = (implementation.name, implementation.role)
    return Row(case.name, shape, *names, status, note, unit=unit)


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """The rows of one case, each compared with the fastest peer, or with torch where none is."""
    timed = [row for row in rows if row.us is not None]
    peers = [row for row in timed if row.role == "peer"]
    peers = peers or [row for row in timed if row.implementation == "torch"]
    if not peers:
        return list(rows)
    best = min(peers, key=lambda row: row.us or 0.0)
    return [
        replace(row, ratio=best.us / row.us, best_peer=best.implementation)
        if row.us and best.us
        else row
        for row in rows
    ]
