"""Tokens a verification: trees of drafts beside chains of as many, over the same answers."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean, stdev

from anabranch.llm.bench.bench_options import parse_sizes
from anabranch.llm.bench.run_results import RunResults, begin_results
from anabranch.llm.bench.table import Table
from anabranch.llm.cli.progress import Progress
from engine_bench.source_options import TreeOptions
from engine_bench.tasks import TEXTS, summary_messages


def run_tree(options: TreeOptions, progress: Progress) -> RunResults:
    """A row for each number of drafts and shape, with a mean for each answer."""
    from anabranch.llm.sampling.params import SamplingParams

    options = replace(options, speculative="ngram", draft_model=None, adaptive=False)
    results = begin_results("drafts", options.torch_device(), options)
    texts = (TEXTS / "tasks.txt").read_text().splitlines()
    tasks = [summary_messages(options.file, task) for task in texts]
    params = [
        SamplingParams(temperature=0.8 if seed else 0.0, seed=seed, max_tokens=options.output_len)
        for seed in range(options.seeds)
    ]
    for (size,) in parse_sizes(options.sizes, "4,8", "--sizes"):
        for width in (1, options.tree_width):
            llm = replace(options, num_drafts=size, tree_width=width).make(progress)
            prompts = [llm.chat_prompt(task) for task in tasks for _ in params]
            progress(f"{size} drafts, width {width}", 0, 0)
            answers = llm.generate(prompts, params * len(tasks))
            samples = [mean(answer.outputs[0].verifications or [1]) for answer in answers]
            results.rows.append({"drafts": size, "width": width, "samples": samples})
    return results


def tree_table(results: RunResults) -> Table:
    """Chains and trees of a size in a line: means and spreads over the answers."""
    lines: list[list[str]] = []
    for chain, tree in zip(results.rows[::2], results.rows[1::2], strict=True):
        gains = [b / a for a, b in zip(chain["samples"], tree["samples"], strict=True)]
        more, fewer = (sum(sign * gain > sign for gain in gains) for sign in (1, -1))
        cells = [f"{mean(s):.2f} ± {stdev(s):.2f}" for s in (chain["samples"], tree["samples"])]
        cells += [f"{mean(gains):.3f} ± {stdev(gains):.3f}", f"{more} more, {fewer} fewer"]
        lines.append([str(chain["drafts"]), *cells])
    title = f"tokens a verification, n-grams, {results.options['model']}: mean ± deviation"
    return Table(title, ["drafts", "chain", "tree", "ratio", "answers"], lines, [results.where])
