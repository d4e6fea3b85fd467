"""Prompt and generation speed against context, attention implementations side by side.

`pp512` is the speed of a prompt of 512 tokens, `tg128@pp512` that of the 128 tokens behind it.
"""

# ruff: noqa: RUF009 - `option` is a field

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from anabranch.bench.engine.bars import Progress
from anabranch.bench.engine.engine_options import BenchOptions, release
from anabranch.bench.engine.fields import check_positive, option
from anabranch.bench.engine.prompts import random_prompts
from anabranch.bench.engine.run_results import Record, RunResults, begin_results, mean_spread
from anabranch.bench.engine.transformers_peer import TransformersPeer
from anabranch.bench.table import Table, format_number

ENGINE = "anabranch"
PEER = "transformers-"


@dataclass(frozen=True, kw_only=True)
class SweepOptions(BenchOptions):
    """Contexts, and who runs them."""

    contexts: str = option("512,1024,2048,4096,8192,16384", "Prompt lengths, with commas.")
    generate: int = option(128, "Tokens behind each prompt.")
    repeats: int = option(3, "Times to measure; mean and spread are shown.")
    impls: str = option(
        "anabranch,transformers-sdpa,transformers-eager",
        "Who runs, with commas: anabranch is this engine, transformers-NAME is transformers "
        "with the attention implementation NAME (sdpa, eager, anabranch).",
    )
    plot: Path | None = option(None, "Draw tokens/s against context into this file.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "generate", "repeats")
        for name in self.names():
            if name != ENGINE and not name.startswith(PEER):
                raise ValueError(f"--impls must be {ENGINE} or {PEER}NAME, got {name!r}")
        self.lengths()

    def names(self) -> list[str]:
        """Who runs."""
        return [name.strip() for name in self.impls.split(",")]

    def lengths(self) -> list[int]:
        """Prompt lengths, the shortest first."""
        given = [part.strip() for part in self.contexts.split(",")]
        if not all(part.isdecimal() and int(part) > 0 for part in given):
            raise ValueError(f"--contexts must be numbers with commas, got {self.contexts!r}")
        return sorted(int(part) for part in given)


class Contender(Protocol):
    """Whoever can be timed."""

    vocab_size: int
    max_len: int  # tokens of a sequence

    def prefill_seconds(self, prompt: Sequence[int]) -> float:
        """From a prompt to its first token."""
        ...

    def decode_seconds(self, prompt: Sequence[int], num_tokens: int) -> float:
        """Of the tokens behind the first."""
        ...


class EngineContender:
    """This engine, one sequence at a time."""

    def __init__(self, options: SweepOptions, progress: Progress) -> None:
        self._llm = options.make(progress, max_num_seqs=1, prefix_caching=False)
        self.vocab_size = self._llm.engine.vocab_size
        self.max_len = self._llm.engine.limits.max_model_len

    def prefill_seconds(self, prompt: Sequence[int]) -> float:
        """From a prompt to its first token."""
        start = time.monotonic()
        self._run(prompt, 1)
        return time.monotonic() - start

    def decode_seconds(self, prompt: Sequence[int], num_tokens: int) -> float:
        """Of the tokens behind the first."""
        first, last = self._run(prompt, 1 + num_tokens)
        return last - first

    def _run(self, prompt: Sequence[int], num_tokens: int) -> tuple[float, float]:
        from anabranch.engine.sampling_params import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        times = self._llm.generate([prompt], params)[0].times
        assert times is not None
        assert times.first_token is not None and times.last_token is not None
        return times.first_token, times.last_token


def run_sweep(options: SweepOptions, progress: Progress) -> RunResults:
    """Rows of one contender after another; a context that fails is a row that says why."""
    results = begin_results("sweep", options.torch_device(), options)
    for name in options.names():
        contender: Contender = (
            EngineContender(options, progress)
            if name == ENGINE
            else TransformersPeer(options, name.removeprefix(PEER), progress)
        )
        results.rows.extend(_sweep(name, contender, options, progress))
        del contender
        release()
        if options.out:
            results.save(options.out)
    return results


def _sweep(
    name: str, contender: Contender, options: SweepOptions, progress: Progress
) -> list[Record]:
    rows: list[Record] = []
    lengths, count = options.lengths(), options.generate
    for place, length in enumerate(lengths):
        progress(f"{name} at {length}", place, len(lengths))
        prompts = random_prompts(options.repeats + 1, length, contender.vocab_size, seed=length)
        kinds: dict[str, tuple[int, Callable[[list[int]], float]]] = {
            f"pp{length}": (length, contender.prefill_seconds),
            f"tg{count}@pp{length}": (
                count,
                lambda prompt: contender.decode_seconds(prompt, count),
            ),
        }
        for test, (tokens, measure) in kinds.items():
            row: Record = {"implementation": name, "test": test, "context": length}
            if length + count >= contender.max_len:
                row["error"] = f"the model's context has {contender.max_len} tokens"
            else:
                row |= _rates(tokens, measure, prompts)
            rows.append(row)
            release()
    return rows


def _rates(tokens: int, measure: Callable[[list[int]], float], prompts: list[list[int]]) -> Record:
    """Tokens a second; the first prompt warms up."""
    try:
        measure(prompts[0])
        rates = [tokens / measure(prompt) for prompt in prompts[1:]]
    except (torch.OutOfMemoryError, RuntimeError) as error:
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    mean, spread = mean_spread(rates)
    return {"tokens_s": mean, "spread": spread, "samples": rates}


def sweep_table(results: RunResults) -> Table:
    """Tests as lines, implementations as columns, tokens/s as mean ± standard deviation."""
    names = list(dict.fromkeys(row["implementation"] for row in results.rows))
    tests = dict.fromkeys(row["test"] for row in results.rows)
    ordered = sorted(tests, key=lambda test: test.startswith("tg"))
    cells = {(row["test"], row["implementation"]): row for row in results.rows}
    lines = [[test, *(_cell(cells.get((test, name))) for name in names)] for test in ordered]
    errors = [f"{row['implementation']} {row['test']}: {row['error']}"
              for row in results.rows if "error" in row]  # fmt: skip
    return Table(f"tokens/s, {results.where}", ["test", *names], lines, errors)


def _cell(row: Record | None) -> str:
    if row is None:
        return ""
    if "error" in row:
        return "-"
    return f"{format_number(row['tokens_s'])} ± {format_number(row['spread'])}"
