"""Runs the benchmark and shows what it found."""

from __future__ import annotations

from dataclasses import replace

from anabranch.bench.engine.bars import progress_bars
from anabranch.bench.engine.plots import check_matplotlib
from anabranch.bench.engine.run_results import RunResults
from anabranch.bench.serve.bench import run_serve
from anabranch.bench.serve.block import result_block
from anabranch.bench.serve.options import ServeOptions
from anabranch.bench.serve.plots import draw_loads
from anabranch.bench.serve.tables import load_table, side_by_side
from anabranch.bench.table import print_table

HELP = (
    "Load an OpenAI endpoint, ours or another, and report throughput and latencies.\n\n"
    "    anabranch bench serve --num-prompts 256 --concurrency 16\n"
    "    anabranch bench serve --base-url http://host:8000 --request-rate 4 --prompts q.jsonl\n"
    "    anabranch bench serve --sweep 1,2,4,8,16 --plot load.svg --out load.json\n"
    "    anabranch bench serve --launch smollm2 --compare speculative --concurrency 8\n"
    "    anabranch bench serve --launch dummy:llama-3.1-8b --cases 4096x1024,8192x64 "
    "--concurrency 16 --ignore-eos --engine\n"
)


def run_and_show(options: ServeOptions) -> None:
    """Run, print, and write what was asked for."""
    check_matplotlib(options.plot)
    with progress_bars() as progress:
        results = run_serve(options, progress)
    if options.out:
        results.save(options.out)
    show(results, sweep=options.sweep is not None)
    if options.plot:
        draw_loads(results, options.plot)
    for path in (options.out, options.plot):
        if path:
            print(f"written to {path}")


def show(results: RunResults, *, sweep: bool) -> None:
    """A block for one setting, a table for several, by load."""
    several = len({row["load"] for row in results.rows}) > 1
    if sweep:
        print_table(load_table(results))
        return
    for load in dict.fromkeys(row["load"] for row in results.rows):
        rows = [row for row in results.rows if row["load"] == load]
        if len(rows) > 1:
            print_table(side_by_side(replace(results, rows=rows)))
        else:
            print(f"{load}\n" * several + result_block(rows[0]))
