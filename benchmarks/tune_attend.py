"""Is the configuration that attend() selects still the best? Times it against its neighbours.

    python benchmarks/tune_attend.py decode --filter table --out tuning.json
    python benchmarks/tune_attend.py verify --list            # what would be tried; needs no GPU

A neighbour differs in one field of AttendConfig. Each is checked against float64 before it is
timed by CUDA-graph replay. What wins here goes into kernels/config.py, with its figures.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attention_bench.cases import AttendCase
from attention_bench.exact import CallResult, expected_of
from attention_bench.grids import cases_of
from attention_bench.inputs import AttendInputs, make_inputs
from attention_bench.timing import time_graph

import anabranch as ab
from anabranch.kernels.config import AttendConfig, select_attend
from anabranch.llm.bench.run_results import make_header

STEPS: dict[str, tuple[float, ...]] = {  # factors by which a field is changed
    "block_m": (0.5, 2),
    "block_n": (0.5, 2),
    "num_warps": (0.5, 2),
    "workers_per_sm": (0.5, 2),
    "merge_rows": (0.25, 4),
    "merge_batch": (0.5, 2),
    "block_price": (0.5, 2),
}


def selected(case: AttendCase) -> AttendConfig:
    """What make_plan() chooses for a case, on a GPU with the shared memory of Hopper."""
    group = case.num_heads // case.num_kv_heads
    return select_attend(
        rows_per_seq=case.q_len * group,
        num_pairs=case.num_seqs * case.num_kv_heads,
        head_dim_k=case.head_dim,
        head_dim_v=case.head_dim_v,
        itemsize=2,
        window=case.window,
    )


def neighbours(config: AttendConfig) -> Iterator[tuple[str, AttendConfig]]:
    """The configuration itself, then those that differ from it in one field."""
    yield "selected", config
    yield "other side first", replace(config, keys_first=not config.keys_first)
    yield "other copies first", replace(config, values_first=not config.values_first)
    for stages in (config.num_stages - 1, config.num_stages + 1):
        if stages >= 2:
            yield f"num_stages {stages}", replace(config, num_stages=stages)
    for field, factors in STEPS.items():
        for factor in factors:
            value = int(getattr(config, field) * factor)
            if value >= (16 if field.startswith("block_") and field != "block_price" else 1):
                yield f"{field} {value}", replace(config, **{field: value})


def time_config(config: AttendConfig, inputs: AttendInputs, prefill: bool) -> float | str:
    """Microseconds, or why there are none."""
    options: dict[str, Any] = {"cu_seqlens_q": inputs.cu_seqlens_q, "window": inputs.case.window}
    keys = inputs.dense if prefill else inputs.paged
    plan = ab.make_plan(inputs.queries[0], keys[0], config=config, **options)
    calls = [
        partial(ab.attend, q, source, plan=plan, **options)
        for q, source in zip(inputs.queries, keys, strict=True)
    ]
    complaint = expected_of(inputs).complaint(CallResult(*calls[0]()))
    return complaint or time_graph(calls, inputs.queries[0].device)[0].us


def tune(bench: str, case: AttendCase) -> Iterator[dict[str, Any]]:
    """A row for each neighbour, as soon as it is there."""
    inputs = make_inputs(case, torch.device("cuda"))
    assert isinstance(inputs, AttendInputs)
    for name, config in neighbours(selected(case)):
        try:
            result = time_config(config, inputs, bench == "prefill")
        except Exception as error:  # too large for this GPU, or for the compiler
            result = f"{type(error).__name__}: {str(error)[:80]}"
        us, note = (result, "") if isinstance(result, float) else (None, result)
        yield {"case": case.name, "change": name, "us": us, "note": note, **asdict(config)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bench", choices=("decode", "verify", "prefill"))
    parser.add_argument("--filter", default="table", help="cases whose name or group has this")
    parser.add_argument("--list", action="store_true", help="print the configurations and stop")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for case in cases_of(given.bench, "cuda", pattern=given.filter):
        assert isinstance(case, AttendCase)
        print(case.name)
        if given.list:
            for name, config in neighbours(selected(case)):
                print(f"  {name:<24} {config}")
            continue
        for row in tune(given.bench, case):
            print(f"  {row['change']:<24} {row['us'] or row['note']}", flush=True)
            rows.append(row)
    if given.out:
        device = torch.device("cuda")
        header = make_header("tuning", device)
        given.out.write_text(json.dumps({"header": asdict(header), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
