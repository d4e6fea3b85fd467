"""The engine on a CPU beside transformers, in one run: batch 1, n-gram drafts, a batch of 8."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

from anabranch.llm.bench.run_results import Record, RunResults, begin_results
from anabranch.llm.bench.table import Table, format_number
from anabranch.llm.bench.transformers_peer import TransformersPeer
from anabranch.llm.bench.workload import greedy
from anabranch.llm.cli.progress import Progress
from engine_bench.source_options import CpuOptions
from engine_bench.tasks import question_messages, summary_messages

if TYPE_CHECKING:
    from anabranch.llm.engine.llm import LLM

Runs = dict[str, tuple[int, Callable[[], object]]]  # output tokens, and the call that makes them
TRANSFORMERS, ENGINE = "transformers generate", "anabranch"
PLAIN, NGRAM = "summarise, no drafts", "summarise, n-gram"
AFTER_PROMPT = {name: f"{name}, after the prompt" for name in (PLAIN, NGRAM)}
ONE_BY_ONE, BATCHED = "one by one", "batched"


def run_cpu(options: CpuOptions, progress: Progress) -> RunResults:
    """Interleaved rounds, so that other load on the machine affects all runs alike."""
    dtype = options.dtype or "float32"
    options = replace(options, device="cpu", dtype=dtype, speculative="ngram", draft_model=None)
    messages = summary_messages(options.file)
    results = begin_results("cpu", options.torch_device(), options)
    llm = options.make(progress, max_num_seqs=max(options.prompts, 2), prefix_caching=False)
    peer = TransformersPeer(options, "sdpa", progress)
    runs = _runs(llm, peer, messages, options)
    for name in (TRANSFORMERS, ENGINE, NGRAM):
        progress(f"warming up: {name}", 0, 0)
        runs[name][1]()
    seconds: dict[str, list[float]] = {name: [] for name in (*runs, *AFTER_PROMPT.values())}
    for i in range(options.repeats):
        for name, (_, run) in runs.items():
            progress(f"round {i + 1}: {name}", i, options.repeats)
            start = time.perf_counter()
            answers: Any = run()
            seconds[name].append(time.perf_counter() - start)
            if name in AFTER_PROMPT:
                times: Any = answers[0].times
                seconds[AFTER_PROMPT[name]].append(times.last_token - times.first_token)
    counts = {name: tokens for name, (tokens, _) in runs.items()}
    counts |= {name: options.output_len - 1 for name in seconds if name not in counts}
    for name, taken in seconds.items():
        rates = [counts[name] / max(each, 1e-9) for each in taken]
        results.rows.append({"name": name, "tokens_s": median(rates), "samples": rates})
    results.rows.extend(bars_of({row["name"]: row["tokens_s"] for row in results.rows}))
    return results


def _runs(
    llm: LLM, peer: TransformersPeer, messages: list[dict[str, str]], options: CpuOptions
) -> Runs:
    count = options.output_len
    plain, ngram = (greedy(count, speculate=on) for on in (False, True))
    questions = [llm.chat_prompt(messages) for messages in question_messages(options.prompts)]
    summary = llm.chat_prompt(messages)
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
    ("n-gram to no drafts, after the prompt", AFTER_PROMPT[NGRAM], AFTER_PROMPT[PLAIN], 1.5),
    ("batched to one by one", BATCHED, ONE_BY_ONE, 4.0),
)


def bars_of(rates: dict[str, float]) -> list[Record]:
    """Ratios, and what they should be at least."""
    pairs = ((name, rates[ours] / rates[other], bar) for name, ours, other, bar in BARS)
    return [{"ratio_of": name, "ratio": ratio, "bar": bar} for name, ratio, bar in pairs]


def cpu_table(results: RunResults) -> Table:
    """Speeds, and below them the ratios beside their bars."""
    lines: list[list[str]] = []
    for row in results.rows:
        if "ratio_of" in row:
            missed = "" if row["ratio"] >= row["bar"] else "  MISSED"
            lines.append([row["ratio_of"], f"{row['ratio']:.2f}x", f">= {row['bar']:g}x{missed}"])
        else:
            lines.append([row["name"], format_number(row["tokens_s"]), ""])
    title = f"{results.options['model']}, greedy, {results.options['dtype']}: output tokens/s"
    notes = ["Times include the prompt's unless it says so.", results.where]
    return Table(title, ["", "tokens/s or ratio", "bar"], lines, notes)
