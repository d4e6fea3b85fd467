"""The benchmarks of the engine by name: options, run, and how results are shown."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from anabranch.bench.engine import cpu, latency, scorers, sweep, throughput
from anabranch.bench.engine.bars import Progress, progress_bars
from anabranch.bench.engine.engine_options import BenchOptions
from anabranch.bench.engine.plots import check_matplotlib, draw_latency, draw_sweep
from anabranch.bench.engine.run_results import RunResults
from anabranch.bench.table import Table, print_table


class Bench(NamedTuple):
    """What a command needs to know."""

    options: type[BenchOptions]
    run: Callable[[Any, Progress], RunResults]
    show: Callable[[RunResults], str | Table]
    draw: Callable[[RunResults, Path], None] | None
    help: str


BENCHES = {
    "latency": Bench(
        latency.LatencyOptions,
        latency.run_latency,
        latency.latency_text,
        draw_latency,
        "Time a batch from its prompts to its last token; mean and percentiles.\n\n"
        "    anabranch bench latency --input-len 1024 --output-len 128 --batch 8\n"
        "    anabranch bench latency --model dummy:llama-3.1-8b --compare graphs\n"
        "    anabranch bench latency --speculative ngram --compare scorer --out latency.json\n",
    ),
    "throughput": Bench(
        throughput.ThroughputOptions,
        throughput.run_throughput,
        throughput.throughput_text,
        None,
        "Requests and tokens a second, all prompts given at once.\n\n"
        "    anabranch bench throughput --num-prompts 256 --input-len 512 --output-len 128\n"
        "    anabranch bench throughput --range-ratio 0.5 --peer transformers\n",
    ),
    "sweep": Bench(
        sweep.SweepOptions,
        sweep.run_sweep,
        sweep.sweep_table,
        draw_sweep,
        "Prompt speed (pp512) and generation speed (tg128@pp512) against context, "
        "side by side with transformers.\n\n"
        "    anabranch bench sweep --contexts 512,1024,2048 --plot sweep.svg\n"
        "    anabranch bench sweep --impls anabranch,transformers-sdpa,transformers-anabranch\n",
    ),
    "scorers": Bench(
        scorers.ScorersOptions,
        scorers.run_scorers,
        scorers.scorers_table,
        None,
        "One step of the model: k drafts scored by multi-query and by batch expansion, beside "
        "a plain decode step.\n\n"
        "    anabranch bench scorers --model dummy:llama-3.1-8b --batch 64 --context 4096\n",
    ),
    "cpu": Bench(
        cpu.CpuOptions,
        cpu.run_cpu,
        cpu.cpu_table,
        None,
        "The engine on a CPU beside transformers: batch 1, n-gram drafts on a summary, and a "
        "batch against one by one.\n\n"
        "    anabranch bench cpu --output-len 64 --repeats 3 --out cpu.json\n",
    ),
}


def run_bench(name: str, options: BenchOptions) -> None:
    """Run, print, and write what was asked for."""
    bench = BENCHES[name]
    plot: Path | None = getattr(options, "plot", None)
    check_matplotlib(plot)
    quiet_transformers()
    with progress_bars() as progress:
        results = bench.run(options, progress)
    if options.out:
        results.save(options.out)
    shown = bench.show(results)
    if isinstance(shown, Table):
        print_table(shown)
    else:
        print(shown)
    if plot and bench.draw:
        bench.draw(results, plot)
    for path in (options.out, plot, getattr(options, "profile", None)):
        if path:
            print(f"written to {path}")


def quiet_transformers() -> None:
    """Its bars and warnings would run into ours."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
