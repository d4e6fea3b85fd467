"""How long a batch takes from its prompts to its last token."""

from __future__ import annotations

import time
from itertools import pairwise
from statistics import mean, median
from typing import TYPE_CHECKING

import numpy as np

from anabranch.llm.bench.bench_options import LatencyOptions, compared_settings
from anabranch.llm.bench.run_results import Record, RunResults, begin_results
from anabranch.llm.bench.workload import greedy, random_prompts, release_memory
from anabranch.llm.cli.progress import Progress
from anabranch.llm.cli.step_times import RecordedStats, profiled, record_steps

if TYPE_CHECKING:
    from anabranch.llm.engine.llm import LLM
    from anabranch.llm.engine.request import RequestOutput

PERCENTILES = (10, 25, 50, 75, 90, 99)
MAX_PREFILLS = 3
WARM_SEED = 1 << 20  # other prompts than those measured, which would be found in the cache


def run_latency(options: LatencyOptions, progress: Progress) -> RunResults:
    results = begin_results("latency", options.torch_device(), options)
    for variant in compared_settings(options, options.compare):
        cases = variant.each_case()
        longest = max(case.input_len + case.output_len for case in cases)
        sizes = variant.sized(longest, max(case.batch for case in cases))
        llm = variant.make(progress, **sizes)
        results.rows.extend(_measure(llm, case, progress) for case in cases)
        del llm
        release_memory()
    return results


def _measure(llm: LLM, options: LatencyOptions, progress: Progress) -> Record:
    for _ in range(options.warmup):
        progress("warming up", 0, 0)
        _run(llm, options, options.output_len, seed=WARM_SEED)
    stats = record_steps(llm)
    latencies, windows, first_tokens = list[float](), list[float](), list[float]()
    for i in range(options.iterations):
        progress(f"measuring {options.setting()}", i, options.iterations)
        start = time.monotonic()
        outputs = _run(llm, options, options.output_len, seed=i)
        latencies.append(time.monotonic() - start)
        times = [output.times for output in outputs if output.times]
        first_tokens.append(max(each.first_token or start for each in times) - start)
        windows.extend(full_batch_ms(outputs, stats))
    prefills = list[float]()
    speculative, stages = stats.speculative, stats.stage_summary()
    for i in range(min(options.iterations, MAX_PREFILLS)):
        progress("measuring prefill", 0, 0)
        start = time.monotonic()
        _run(llm, options, 1, seed=1000 + i)
        prefills.append(1e3 * (time.monotonic() - start))
    if options.profile:
        folder = options.profile
        if options.compare:
            folder /= options.setting().replace(", ", "-").replace(" ", "-")
        with profiled(llm, folder, progress):
            _run(llm, options, options.output_len)
    decoding = [a - b for a, b in zip(latencies, first_tokens, strict=True)]
    return {
        "setting": options.setting(),
        "case": f"{options.batch} x {options.input_len} in, {options.output_len} out",
        "latencies": latencies,
        **summarise_latencies(latencies),
        "prefill_ms": median(prefills),
        "ms_an_output_token": 1e3 * median(decoding) / max(options.output_len - 1, 1),
        "ms_a_step": median(windows) if windows else None,
        "output_tokens_s": options.batch * options.output_len / mean(latencies),
        "tokens_a_verification": speculative.acceptance_length if speculative.num_drafts else None,
        "acceptance_rate": speculative.acceptance_rate if speculative.num_drafts else None,
        "stages": stages,
    }


def _run(llm: LLM, options: LatencyOptions, output_len: int, seed: int = 0) -> list[RequestOutput]:
    prompts = random_prompts(options.batch, options.input_len, llm.engine.vocab_size, seed)
    return llm.generate(prompts, greedy(output_len))


def full_batch_ms(outputs: list[RequestOutput], stats: RecordedStats) -> list[float]:
    """Milliseconds between steps while every sequence decodes, none being prefilled or done."""
    times = [output.times for output in outputs if output.times]
    start = max(each.first_token or 0.0 for each in times)
    stop = min(each.last_token or 0.0 for each in times)
    landed = [step.landed for step in stats.steps if start <= step.landed <= stop]
    return [1e3 * (b - a) for a, b in pairwise(landed)]


def summarise_latencies(seconds: list[float]) -> Record:
    values = np.percentile(seconds, PERCENTILES).tolist()
    percentiles = dict(zip(map(str, PERCENTILES), values, strict=True))
    return {"avg_latency": mean(seconds), "percentiles": percentiles}


def latency_text(results: RunResults) -> str:
    """The lines that vLLM prints, for each setting, and ratios to the first."""
    first = results.rows[0]
    blocks: list[str] = []
    for row in results.rows:
        heading = [f"{row['setting']}, {row['case']}:"] if len(results.rows) > 1 else []
        blocks.append("\n".join([*heading, *_row_lines(row)]))
    for row in results.rows[1:]:
        if row["case"] == first["case"]:
            ratio = first["avg_latency"] / row["avg_latency"]
            blocks.append(f"{row['setting']} is {ratio:.2f}x as fast as {first['setting']}")
    return "\n\n".join([*blocks, results.where])


def _row_lines(row: Record) -> list[str]:
    percentiles = row["percentiles"].items()
    lines = [
        f"Avg latency: {row['avg_latency']:.4g} seconds",
        *(f"{percent}% percentile latency: {x:.4g} seconds" for percent, x in percentiles),
        f"Prefill: {row['prefill_ms']:.2f} ms",
        f"Output token: {row['ms_an_output_token']:.3f} ms",
    ]
    if row["ms_a_step"] is not None:
        lines.append(f"Step with all sequences decoding: {row['ms_a_step']:.3f} ms")
    if row["acceptance_rate"] is not None:
        lines.append(f"Draft acceptance rate: {row['acceptance_rate']:.3f}")
        lines.append(f"Tokens a verification: {row['tokens_a_verification']:.2f}")
    stages = (f"{name} {times['median_ms']:.3f}" for name, times in row["stages"].items())
    lines.append(f"Stages of a step, median ms: {', '.join(stages)}")
    return lines
