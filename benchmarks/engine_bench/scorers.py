"""One step of the model: k drafts scored by either scorer, and plain decoding.

A logit bias makes every sequence repeat one token, so that n-grams draft k tokens in every step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from anabranch.llm.bench.run_results import Record, RunResults, begin_results
from anabranch.llm.bench.table import Table, format_number
from anabranch.llm.bench.workload import LOWEST_TOKEN, greedy, random_prompts, release_memory
from anabranch.llm.cli.engine_options import SCORERS
from anabranch.llm.cli.progress import Progress
from anabranch.llm.cli.step_times import record_steps
from engine_bench.source_options import ScorersOptions

if TYPE_CHECKING:
    from anabranch.llm.engine.llm import LLM

PLAIN = "plain decode step"
FIRST_STEPS = 4  # prompts, and tokens that n-grams have not met yet


def run_scorers(options: ScorersOptions, progress: Progress) -> RunResults:
    """A row for a plain decode step and one for each scorer, over the same keys."""
    results = begin_results("scorers", options.torch_device(), options)
    for scorer in SCORERS:
        setting = replace(
            options, speculative="ngram", draft_model=None, scorer=scorer, adaptive=False
        )
        most = options.context + (1 + options.num_drafts) * (options.repeats + FIRST_STEPS + 1)
        sizes = setting.sized(most, options.batch) | {"prefix_caching": True}
        llm = setting.make(progress, **sizes)
        if not results.rows:
            results.rows.append(_row(llm, PLAIN, options, 0, progress))
        results.rows.append(_row(llm, scorer, options, options.num_drafts, progress))
        del llm
        release_memory()
    return results


def _row(
    llm: LLM, name: str, options: ScorersOptions, num_drafts: int, progress: Progress
) -> Record:
    progress(f"measuring {name}", 0, 0)
    prompts = random_prompts(options.batch, options.context, llm.engine.vocab_size)
    most = (1 + num_drafts) * (options.repeats + FIRST_STEPS)
    params = greedy(most, logit_bias={LOWEST_TOKEN: 100.0}, speculate=num_drafts > 0)
    # The prompts are then in the cache, so that all sequences decode from the first step on.
    llm.generate(prompts, greedy(1, speculate=False))
    stats = record_steps(llm)
    llm.generate(prompts, params)
    times = stats.stage_summary()["scoring" if num_drafts else "model"]
    return {"name": name, "tokens_a_sequence": 1 + num_drafts, "ms": times["median_ms"]}


def scorers_table(results: RunResults) -> Table:
    """Milliseconds of a step, and their ratio to a plain step."""
    plain, multi_query, expansion = (row["ms"] for row in results.rows)
    steps = [(row["name"], str(row["tokens_a_sequence"]), row["ms"]) for row in results.rows]
    lines = [[*step, format_number(ms), f"{ms / plain:.2f}x"] for *step, ms in steps]
    notes = [f"{SCORERS[0]} is {expansion / multi_query:.2f}x as fast as {SCORERS[1]}"]
    given = results.options
    title = f"one step of {given['model']}, {given['batch']} x {given['context']} keys"
    columns = ["step", "tokens a sequence", "ms", "to plain"]
    return Table(title, columns, lines, [*notes, results.where])
