"""What the rows of a script hold for, and the file they are written to."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
import triton


def header(case: str = "causal") -> dict[str, object]:
    """What the rows hold for."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "commit": os.environ.get("ANABRANCH_COMMIT") or commit.stdout.strip(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "timing": f"CUDA graphs replayed in turn, medians, microseconds a call, bfloat16, {case}",
    }


def print_rows(rows: Iterable[dict[str, object]]) -> list[dict[str, object]]:
    """Print each as a line of JSON as soon as it is there; all of them."""
    found: list[dict[str, object]] = []
    for row in rows:
        print(json.dumps(row), flush=True)
        found.append(row)
    return found


def save_rows(
    path: Path | None, about: dict[str, object], rows: Sequence[dict[str, object]]
) -> None:
    """Write a file of results, if one is asked for."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"header": about, "rows": [*rows]}, indent=1) + "\n")
