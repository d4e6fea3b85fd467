"""The engine alone on the requests of a run, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from anabranch.bench.engine.run_results import Record
from anabranch.bench.serve.launch import engine_settings
from anabranch.bench.serve.options import Load, Variant


class Measured(NamedTuple):
    """A run over HTTP: its figures and its requests."""

    row: Record
    load: Load
    bodies: list[dict[str, Any]]


def time_engine(variant: Variant, runs: Sequence[Measured]) -> None:
    """Add to every row how fast the engine answers the same requests without HTTP."""
    given = {
        "engine": engine_settings(variant.options),
        "runs": [{"bodies": run.bodies, "concurrency": run.load.concurrency} for run in runs],
    }
    done = subprocess.run(
        [sys.executable, "-m", "anabranch.bench.serve.own_engine"],
        input=json.dumps(given),
        env=os.environ | variant.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        raise ValueError(f"the engine ended with {done.returncode}: {lines[-1]}")
    for run, found in zip(runs, json.loads(done.stdout.splitlines()[-1]), strict=True):
        rate = found["output_tokens"] / found["seconds"]
        run.row["engine"] = {
            "duration": found["seconds"],
            "total_output_tokens": found["output_tokens"],
            "output_throughput": rate,
            "http_to_engine": run.row["output_throughput"] / rate,
        }
