"""Prompt and generation speed against context, implementations side by side.

`pp512` is the speed of a prompt of 512 tokens, `tg128@pp512` that of the 128 tokens after it: the
time of 129 tokens less that of the first.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import mean, stdev
from typing import NamedTuple

import torch

from anabranch.bench.engine.bench_options import TRANSFORMERS_PREFIX, SweepOptions
from anabranch.bench.engine.transformers_peer import TransformersPeer
from anabranch.bench.engine.workload import random_prompts
from anabranch.bench.results import Record, RunResults, begin_results
from anabranch.bench.table import Table, format_number
from anabranch.bench.timing import release_memory, synchronize
from anabranch.cli.progress import Progress


class Contender(NamedTuple):
    """An implementation that can be timed."""

    vocab_size: int
    max_len: int  # tokens of a sequence
    generate: Callable[[list[int], int], object]  # a prompt, and how many tokens follow


def run_sweep(options: SweepOptions, progress: Progress) -> RunResults:
    """Rows of one contender after another; a context that fails is a row with the reason."""
    results = begin_results("sweep", options.torch_device(), options)
    for name in options.names():
        contender = _contender(name, options, progress)
        results.rows.extend(_sweep(name, contender, options, progress))
        del contender
        release_memory()
        if options.out:
            results.save(options.out)
    return results


def _contender(name: str, options: SweepOptions, progress: Progress) -> Contender:
    from anabranch.sampling.params import SamplingParams

    if name != "anabranch":
        peer = TransformersPeer(options, name.removeprefix(TRANSFORMERS_PREFIX), progress)
        return Contender(peer.vocab_size, peer.max_len, peer.generate_one)
    llm = options.make(progress, max_num_seqs=1, prefix_caching=False)

    def generate(prompt: list[int], num_tokens: int) -> object:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        return llm.generate([prompt], params)

    return Contender(llm.engine.vocab_size, llm.engine.limits.max_model_len, generate)


def _sweep(
    name: str, contender: Contender, options: SweepOptions, progress: Progress
) -> list[Record]:
    device, count, rows = options.torch_device(), options.generate, list[Record]()

    def seconds(prompt: list[int], num_tokens: int) -> float:
        synchronize(device)
        start = time.perf_counter()
        contender.generate(prompt, num_tokens)
        synchronize(device)
        return time.perf_counter() - start

    def after_first(prompt: list[int]) -> float:
        return seconds(prompt, 1 + count) - seconds(prompt, 1)

    for place, length in enumerate(options.lengths()):
        progress(f"{name} at {length}", place, len(options.lengths()))
        prompts = random_prompts(options.repeats + 1, length, contender.vocab_size, seed=length)
        prompt_row: Record = {"implementation": name, "test": f"pp{length}", "context": length}
        output_row = prompt_row | {"test": f"tg{count}@pp{length}"}
        if length + count >= contender.max_len:
            reason = {"error": f"the model's context has {contender.max_len} tokens"}
            rows += [prompt_row | reason, output_row | reason]
        else:
            rows.append(prompt_row | _rates(length, lambda p: seconds(p, 1), prompts))
            rows.append(output_row | _rates(count, after_first, prompts))
    return rows


def _rates(tokens: int, measure: Callable[[list[int]], float], prompts: list[list[int]]) -> Record:
    """Tokens a second; the first prompt warms up."""
    try:
        measure(prompts[0])
        rates = [tokens / measure(prompt) for prompt in prompts[1:]]
    except (torch.OutOfMemoryError, RuntimeError) as error:
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    spread = stdev(rates) if len(rates) > 1 else 0.0
    return {"tokens_s": mean(rates), "spread": spread, "samples": rates}


def sweep_table(results: RunResults) -> Table:
    """Tests as lines, implementations as columns, tokens/s as mean ± standard deviation."""
    names = list(dict.fromkeys(row["implementation"] for row in results.rows))
    tests = dict.fromkeys(row["test"] for row in results.rows)
    ordered = sorted(tests, key=lambda test: test.startswith("tg"))
    cells = {(row["test"], row["implementation"]): row for row in results.rows}
    lines = [[test, *(_cell(cells[test, name]) for name in names)] for test in ordered]
    errors = [f"{row['implementation']} {row['test']}: {row['error']}"
              for row in results.rows if "error" in row]  # fmt: skip
    return Table(f"tokens/s, {results.where}", ["test", *names], lines, errors)


def _cell(row: Record) -> str:
    if "error" in row:
        return "-"
    return f"{format_number(row['tokens_s'])} ± {format_number(row['spread'])}"
