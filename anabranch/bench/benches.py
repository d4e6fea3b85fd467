"""Benchmarks of the engine and the soak by name: how each is run and printed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from anabranch.bench.engine import cpu, latency, scorers, sweep, throughput
from anabranch.bench.engine.bench_options import BenchOptions
from anabranch.bench.results import RunResults
from anabranch.bench.serve import soak
from anabranch.bench.serve.soak_options import SoakOptions
from anabranch.bench.table import Table, print_paths, print_table
from anabranch.cli.progress import Progress, progress_bars, quiet_transformers

Run = Callable[[Any, Progress], RunResults]
Show = Callable[[RunResults], str | Table]
BENCHES: dict[str, tuple[Run, Show]] = {
    "latency": (latency.run_latency, latency.latency_text),
    "throughput": (throughput.run_throughput, throughput.throughput_text),
    "sweep": (sweep.run_sweep, sweep.sweep_table),
    "scorers": (scorers.run_scorers, scorers.scorers_table),
    "cpu": (cpu.run_cpu, cpu.cpu_table),
    "soak": (soak.run_soak, soak.soak_table),
}


def run_and_print(name: str, options: BenchOptions | SoakOptions) -> None:
    """Run, print, and write the files that the options name."""
    run, show = BENCHES[name]
    quiet_transformers()
    with progress_bars() as progress:
        results = run(options, progress)
    if options.out:
        results.save(options.out)
    report = show(results)
    if isinstance(report, Table):
        print_table(report)
    else:
        print(report)
    print_paths(options.out, getattr(options, "profile", None))
