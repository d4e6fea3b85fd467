"""Products with quantised weights beside cuBLAS in bfloat16, from benchmarks/results/linear/."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from anabranch.kernels.layers.quantised_config import (
    MOST_ROWS,
    SCALED_ROWS,
    CodeConstants,
    select_quantised,
    select_rows,
    select_scaled,
)

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate up": (28672, 4096), "down": (4096, 14336)}
FORMATS = {
    "fp8": ("fp8, a scale an output, e4m3 inputs", CodeConstants("fp8", 1, 1 << 20)),
    "blocks": ("fp8 in blocks of 128 x 128", CodeConstants("fp8", 128, 128)),
    "int8": ("int8, a scale an output", CodeConstants("int8", 1, 1 << 20)),
    "int4": ("int4, groups of 128", CodeConstants("int4", 1, 128)),
    "int4/32": ("int4, groups of 32", CodeConstants("int4", 1, 32)),
}
RUNS = ("layer", "variants")  # of benchmarks/quantised_variants.py, the first that there is
NUM_SMS = 132
BANDWIDTH = 4.8e6  # bytes a microsecond, as NVIDIA states


def quantised_section(root: Path) -> str | None:
    """A table of microseconds; None without results."""
    paths = [root / f"benchmarks/results/linear/h200-quantised-{x}.json" for x in RUNS]
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        return None
    results = json.loads(path.read_text())
    shapes = " | ".join(f"{n} x {k}" for n, k in SHAPES.values())
    lines = [f"| weight | rows | {shapes} |", "|---|---:|---:|---:|---:|---:|"]
    for name, (label, constants) in FORMATS.items():
        rows = [row for row in results["rows"] if row["format"] == name]
        if not rows:
            continue
        bits = 16 / constants.parts
        floors = " | ".join(f"{n * k * bits / 8 / BANDWIDTH:.1f}" for n, k in SHAPES.values())
        lines.append(f"| {label} | floor | {floors} |")
        for m in sorted({row["rows"] for row in rows}):
            cells = {row["shape"]: _cell(row, constants) for row in rows if row["rows"] == m}
            lines.append(f"| | {m} | {' | '.join(cells.get(shape, '') for shape in SHAPES)} |")
    header = results["header"]
    versions = f"torch {header['torch']}, triton {header['triton']}"
    lines += [
        "",
        f"{header['device']}, {versions}; commit {header['commit'][:7]}, {header['date']}.",
    ]
    return "\n".join(lines)


def _cell(row: dict[str, Any], constants: CodeConstants) -> str:
    """The layer, or in a sweep the way that it chooses; and cuBLAS."""
    found = {way["way"]: way["us"] for way in row["ways"] if "us" in way}
    chosen = chosen_way(row["format"], constants, row["rows"], *SHAPES[row["shape"]])
    return f"{found['layer' if 'layer' in found else chosen]:.1f} / {row['cublas']:.1f}"


def chosen_way(name: str, constants: CodeConstants, m: int, n: int, k: int) -> str:
    """What a layer does for so many rows, as the sweep calls it."""
    if few := select_rows(constants, m, n, NUM_SMS):
        return f"rows {few.block_n} x {few.runs}, {few.num_warps} warps"
    if name == "fp8" and m > SCALED_ROWS:
        return "torch e4m3 fast"
    if name == "blocks" and m > SCALED_ROWS:
        return "torch blocks"
    if m > MOST_ROWS:
        return "expanded"
    kind, config = "codes", select_quantised(constants, m, n, k, NUM_SMS)
    if name == "fp8" and m > SCALED_ROWS // 2:
        kind, config = "e4m3", select_scaled(m, n, k, NUM_SMS)
    assert config is not None
    tiles = config.block_m, config.block_n, config.num_warps, config.num_stages
    return f"{kind} {tiles} / {config.splits}"
