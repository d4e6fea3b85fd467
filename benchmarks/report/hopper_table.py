"""The Hopper kernel's cases beside its peers, from benchmarks/results/hopper/."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PEERS = ("FA3", "cuDNN")


def hopper_results(root: Path) -> dict[str, Any] | None:
    """The newest run; None without one."""
    found = [json.loads(path.read_text()) for path in root.glob("benchmarks/results/hopper/*.json")]
    return max(found, key=lambda results: results["header"]["date"], default=None)


def hopper_section(root: Path) -> str | None:
    """A table of microseconds and ratios; None without results."""
    results = hopper_results(root)
    if results is None:
        return None
    lines = ["| case | producer | us | FA3 | cuDNN | ratio |", "|---|---|---:|---:|---:|---:|"]
    for row in results["rows"]:
        peers = [f"{row[name]:g}" if name in row else "" for name in PEERS]
        cells = (
            row["case"],
            row["producer"],
            f"{row['anabranch']:g}",
            *peers,
            f"{row['ratio']:.2f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    header = results["header"]
    versions = f"torch {header['torch']}, triton {header['triton']}"
    lines += [
        "",
        f"{header['device']}, {versions}; commit {header['commit'][:7]}, {header['date']}.",
    ]
    return "\n".join(lines)
