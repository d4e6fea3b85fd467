"""Prompt and generation speed against context, implementations side by side.

`pp512` is the speed of a prompt of 512 tokens, `tg128@pp512` that of the 128 tokens after it: the
time of 129 tokens less that of the first.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

import torch

from anabranch.llm.bench.bench_options import ENGINE, TRANSFORMERS_PREFIX, SweepOptions
from anabranch.llm.bench.run_results import Record, RunResults, begin_results
from anabranch.llm.bench.table import PlotLine, PlotPanel, Table, draw_panels, format_number
from anabranch.llm.bench.transformers_peer import TransformersPeer
from anabranch.llm.bench.workload import greedy, random_prompts, release_memory, synchronize
from anabranch.llm.cli.progress import Progress

PANELS = {"pp": "prompt, tokens/s", "tg": "generation, tokens/s"}


class Contender(NamedTuple):
    """An implementation that can be timed."""

    vocab_size: int
    max_len: int  # tokens of a sequence
    generate: Callable[[list[list[int]], int], object]  # prompts, and how many tokens follow

    def seconds(self, prompt: list[int], num_tokens: int, device: torch.device) -> float:
        synchronize(device)
        start = time.perf_counter()
        self.generate([prompt], num_tokens)
        synchronize(device)
        return time.perf_counter() - start


def run_sweep(options: SweepOptions, progress: Progress) -> RunResults:
    """Rows of one contender after another; a context that fails is a row with the reason."""
    results = begin_results("sweep", options.torch_device(), options)
    for name, setting in options.contenders().items():
        contender = _contender(setting, progress)
        results.rows.extend(_sweep(name, contender, setting, progress))
        del contender
        release_memory()
        if options.out:
            results.save(options.out)
    return results


def _contender(options: SweepOptions, progress: Progress) -> Contender:
    if options.impls != ENGINE:
        attention = options.impls.removeprefix(TRANSFORMERS_PREFIX)
        peer = TransformersPeer(options, attention, progress)
        return Contender(peer.vocab_size, peer.max_len, peer.generate)
    llm = options.make(progress, max_num_seqs=1, prefix_caching=False)

    def generate(prompts: list[list[int]], num_tokens: int) -> object:
        return llm.generate(prompts, greedy(num_tokens))

    return Contender(llm.engine.vocab_size, llm.engine.limits.max_model_len, generate)


def _sweep(
    name: str, contender: Contender, options: SweepOptions, progress: Progress
) -> list[Record]:
    device, count, rows = options.torch_device(), options.generate, list[Record]()
    lengths, runs = options.lengths(), options.repeats + 1  # the first warms up
    for place, length in enumerate(lengths):
        prompts = random_prompts(runs, length, contender.vocab_size, seed=length)
        samples: list[tuple[float, float]] = []
        found: list[Record] = [{"error": f"the model's context has {contender.max_len} tokens"}] * 2
        try:
            for i in range(runs if length + count < contender.max_len else 0):
                progress(f"{name} at {length}", place * runs + i, len(lengths) * runs)
                first = contender.seconds(prompts[i], 1, device)
                after = contender.seconds(prompts[i], 1 + count, device) - first
                samples.append((length / first, count / after))
            if samples:
                found = [_summary(rates) for rates in zip(*samples[1:], strict=True)]
        except (torch.OutOfMemoryError, RuntimeError) as error:
            found = [{"error": f"{type(error).__name__}: {error}".splitlines()[0]}] * 2
        for test, row in zip((f"pp{length}", f"tg{count}@pp{length}"), found, strict=True):
            rows.append({"implementation": name, "test": test, "context": length} | row)
    return rows


def _summary(rates: tuple[float, ...]) -> Record:
    spread = stdev(rates) if len(rates) > 1 else 0.0
    return {"tokens_s": mean(rates), "spread": spread, "samples": list(rates)}


def sweep_table(results: RunResults) -> Table:
    """Tokens/s as mean ± standard deviation, and the first implementation's ratio to the others."""
    first, *others = names = list(dict.fromkeys(row["implementation"] for row in results.rows))
    tests = dict.fromkeys(row["test"] for row in results.rows)
    cells = {(row["test"], row["implementation"]): row for row in results.rows}
    lines = [
        [test, *(_cell(cells[test, name]) for name in names)]
        + [_ratio(cells[test, first], cells[test, name]) for name in others]
        for test in sorted(tests, key=lambda test: test.startswith("tg"))
    ]
    errors = [f"{row['implementation']} {row['test']}: {row['error']}"
              for row in results.rows if "error" in row]  # fmt: skip
    columns = ["test", *names, *(f"{first} / {name}" for name in others)]
    return Table(f"tokens/s, {results.where}", columns, lines, errors)


def _cell(row: Record) -> str:
    if "error" in row:
        return "-"
    return f"{format_number(row['tokens_s'])} ± {format_number(row['spread'])}"


def _ratio(ours: Record, theirs: Record) -> str:
    if "error" in ours or "error" in theirs:
        return "-"
    return f"{ours['tokens_s'] / theirs['tokens_s']:.2f}x"


def draw_sweep(results: RunResults, path: Path) -> None:
    """A panel for prompts and one for generation; bars are standard deviations."""
    timed = [row for row in results.rows if "error" not in row]
    names = dict.fromkeys(row["implementation"] for row in timed)
    panels: list[PlotPanel] = []
    for kind, label in PANELS.items():
        lines: list[PlotLine] = []
        for place, name in enumerate(names):
            rows = [x for x in timed if x["implementation"] == name and x["test"].startswith(kind)]
            points = [(row["context"], row["tokens_s"]) for row in rows]
            lines.append(PlotLine(name, points, place, spread=[row["spread"] for row in rows]))
        panels.append(PlotPanel("context, tokens", label, lines))
    draw_panels(f"{results.options['model']}, {results.where}", panels, path)
