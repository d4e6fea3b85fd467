"""The engine on a CPU beside transformers, in one run: batch 1, n-gram drafts, a batch of 8."""

# ruff: noqa: RUF009 - `option` is a field

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from anabranch.bench.engine.bars import Progress
from anabranch.bench.engine.engine_options import BenchOptions
from anabranch.bench.engine.fields import check_positive, option
from anabranch.bench.engine.prompts import question_messages, river_text, summarise_messages
from anabranch.bench.engine.run_results import Record, RunResults, begin_results
from anabranch.bench.engine.transformers_peer import TransformersPeer
from anabranch.bench.table import Table, format_number

if TYPE_CHECKING:
    from anabranch.engine.llm import LLM

Runs = dict[str, tuple[int, Callable[[], object]]]  # output tokens, and what makes them
TRANSFORMERS, ENGINE = "transformers generate", "anabranch"
PLAIN, NGRAM = "summarise, no drafts", "summarise, n-gram"
BEHIND = ", behind the prompt"
ONE_BY_ONE, BATCHED = "one by one", "batched"


@dataclass(frozen=True, kw_only=True)
class CpuOptions(BenchOptions):
    """Greedy answers of real prompts."""

    output_len: int = option(64, "Tokens of an answer.")
    prompts: int = option(8, "Prompts of the batch.")
    repeats: int = option(3, "Rounds; everything runs once in each, medians are shown.")
    file: Path | None = option(None, "Text to summarise; examples/river.txt unless given.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "output_len", "prompts", "repeats")


def run_cpu(options: CpuOptions, progress: Progress) -> RunResults:
    """Interleaved rounds, so that whatever else the machine does falls on all alike."""
    options = replace(
        options,
        device="cpu",
        dtype=options.dtype or "float32",
        speculative="ngram",
        draft_model=None,
    )
    text = river_text(options.file)
    results = begin_results("cpu", options.torch_device(), options)
    llm = options.make(progress, max_num_seqs=max(options.prompts, 2), prefix_caching=False)
    peer = TransformersPeer(options, "sdpa", progress)
    runs = _runs(llm, peer, text, options)
    for name in (TRANSFORMERS, ENGINE, NGRAM):
        progress(f"warming up: {name}", 0, 0)
        runs[name][1]()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    behind: dict[str, list[float]] = {PLAIN: [], NGRAM: []}
    for i in range(options.repeats):
        for name, (_, run) in runs.items():
            progress(f"round {i + 1}: {name}", i, options.repeats)
            start = time.perf_counter()
            answers = run()
            seconds[name].append(time.perf_counter() - start)
            if name in behind:
                behind[name].append(_seconds_behind_prompt(answers))
    for name, (tokens, _) in runs.items():
        rates = [tokens / each for each in seconds[name]]
        results.rows.append({"name": name, "tokens_s": median(rates), "samples": rates})
    for name, taken in behind.items():
        rates = [(options.output_len - 1) / max(each, 1e-9) for each in taken]
        row = {"name": f"{name}{BEHIND}", "tokens_s": median(rates), "samples": rates}
        results.rows.append(row)
    results.rows.extend(bars_of({row["name"]: row["tokens_s"] for row in results.rows}))
    return results


def _seconds_behind_prompt(answers: Any) -> float:
    """From the first token of an answer to its last."""
    times = answers[0].times
    return times.last_token - times.first_token


def _runs(llm: LLM, peer: TransformersPeer, text: str, options: CpuOptions) -> Runs:
    from anabranch.engine.sampling_params import SamplingParams

    count = options.output_len
    plain, ngram = (
        SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, speculate=on)
        for on in (False, True)
    )
    questions = [llm.chat_prompt(messages) for messages in question_messages(options.prompts)]
    summary = llm.chat_prompt(summarise_messages(text))
    return {
        TRANSFORMERS: (count, lambda: peer.generate(questions[:1], count)),
        ENGINE: (count, lambda: llm.generate(questions[:1], plain)),
        PLAIN: (count, lambda: llm.generate([summary], plain)),
        NGRAM: (count, lambda: llm.generate([summary], ngram)),
        ONE_BY_ONE: (
            count * len(questions),
            lambda: [llm.generate([question], plain) for question in questions],
        ),
        BATCHED: (count * len(questions), lambda: llm.generate(questions, plain)),
    }


BARS = (
    ("batch 1 to transformers", ENGINE, TRANSFORMERS, 1.2),
    ("n-gram to no drafts", NGRAM, PLAIN, 1.5),
    ("n-gram to no drafts, behind the prompt", f"{NGRAM}{BEHIND}", f"{PLAIN}{BEHIND}", 1.5),
    ("batched to one by one", BATCHED, ONE_BY_ONE, 4.0),
)


def bars_of(rates: dict[str, float]) -> list[Record]:
    """Ratios, and what they should be at least."""
    return [
        {"ratio_of": name, "ratio": rates[ours] / rates[other], "bar": bar}
        for name, ours, other, bar in BARS
    ]


def cpu_table(results: RunResults) -> Table:
    """Speeds, and below them the ratios beside their bars."""
    lines: list[list[str]] = []
    for row in results.rows:
        if "ratio_of" in row:
            lines.append([row["ratio_of"], f"{row['ratio']:.2f}x", f">= {row['bar']:g}x"])
        else:
            lines.append([row["name"], format_number(row["tokens_s"]), ""])
    title = f"{results.options['model']}, greedy, {results.options['dtype']}: output tokens/s"
    notes = ["Times include the prompt's unless it says so.", results.where]
    return Table(title, ["", "tokens/s or ratio", "bar"], lines, notes)
