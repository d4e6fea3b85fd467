"""Benchmarks of the engine and of a server by name: how each is run, printed and drawn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from anabranch.bench.engine import cpu, latency, scorers, sweep, throughput, tree_drafts
from anabranch.bench.line_plot import check_matplotlib
from anabranch.bench.results import RunResults
from anabranch.bench.serve import load_plot, result_block, serve_bench, soak
from anabranch.bench.table import Table, print_paths, print_table
from anabranch.llm.cli.progress import Progress, progress_bars, quiet_transformers


class Bench(NamedTuple):
    """What a benchmark consists of."""

    run: Callable[[Any, Progress], RunResults]
    show: Callable[[RunResults], str | Table]
    draw: Callable[[RunResults, Path], None] | None = None


BENCHES = {
    "latency": Bench(latency.run_latency, latency.latency_text),
    "throughput": Bench(throughput.run_throughput, throughput.throughput_text),
    "sweep": Bench(sweep.run_sweep, sweep.sweep_table, sweep.draw_sweep),
    "scorers": Bench(scorers.run_scorers, scorers.scorers_table),
    "cpu": Bench(cpu.run_cpu, cpu.cpu_table),
    "drafts": Bench(tree_drafts.run_tree, tree_drafts.tree_table),
    "serve": Bench(serve_bench.run_serve, result_block.serve_report, load_plot.draw_loads),
    "soak": Bench(soak.run_soak, soak.soak_table),
}


def run_and_print(name: str, options: Any) -> None:
    """Run, print, and write the files that the options name."""
    bench = BENCHES[name]
    plot = options.plot if bench.draw else None
    check_matplotlib(plot)
    quiet_transformers()
    with progress_bars() as progress:
        results = bench.run(options, progress)
    if options.out:
        results.save(options.out)
    report = bench.show(results)
    if isinstance(report, Table):
        print_table(report)
    else:
        print(report)
    if bench.draw and plot:
        bench.draw(results, plot)
    print_paths(options.out, plot, getattr(options, "profile", None))
