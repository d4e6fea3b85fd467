"""How a benchmark of the engine or of a server is run, printed and drawn; those of the wheel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from anabranch.llm.bench import latency, sweep, throughput
from anabranch.llm.bench.run_results import RunResults
from anabranch.llm.bench.serve import result_block, serve_bench
from anabranch.llm.bench.table import Table, check_matplotlib, print_paths, print_table
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
    "serve": Bench(serve_bench.run_serve, result_block.serve_report, result_block.draw_loads),
}


def run_and_print(bench: Bench, options: Any) -> None:
    """Run, print, and write the files that the options name."""
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
