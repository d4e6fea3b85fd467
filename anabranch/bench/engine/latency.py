"""How long a batch takes from its prompts to its last token."""

# ruff: noqa: RUF009 - `option` is a field

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING

import numpy as np

from anabranch.bench.engine.bars import Progress
from anabranch.bench.engine.engine_options import BenchOptions, release
from anabranch.bench.engine.fields import check_choices, check_positive, option
from anabranch.bench.engine.profile import profiled
from anabranch.bench.engine.prompts import random_prompts
from anabranch.bench.engine.run_results import Record, RunResults, begin_results
from anabranch.bench.engine.step_record import RecordedStats, record_steps

if TYPE_CHECKING:
    from anabranch.engine.llm import LLM
    from anabranch.engine.outputs import RequestOutput

PERCENTILES = (10, 25, 50, 75, 90, 99)
COMPARE = ("scorer", "graphs", "speculative", "compile")
MAX_PREFILLS = 3
WARM_SEED = 1 << 20  # other prompts than those measured, which would be found in the cache


@dataclass(frozen=True, kw_only=True)
class LatencyOptions(BenchOptions):
    """A batch of random prompts of one length, run again and again."""

    input_len: int = option(32, "Tokens of a prompt.")
    output_len: int = option(128, "Tokens of an answer.")
    batch: int = option(1, "Prompts at once.")
    cases: str | None = option(
        None, "Several of them by one engine: '8x1024x128,64x4096x64', batch x input x output."
    )
    iterations: int = option(5, "Times to measure.")
    warmup: int = option(1, "Times to run before.")
    compare: str | None = option(
        None, "Run both settings of this, one after the other.", choices=COMPARE
    )
    tokens_a_step: float | None = option(
        None,
        "Print ms a token as if every step emitted this many: random weights accept no drafts.",
    )
    plot: Path | None = option(None, "Draw the distribution of latencies into this file.")
    profile: Path | None = option(
        None, "Folder for a torch profiler trace and a picture of the stages.", metavar="DIR"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "input_len", "output_len", "batch", "iterations")
        if self.warmup < 0:
            raise ValueError(f"--warmup must be at least 0, got {self.warmup}")
        if self.compare == "scorer" and self.speculative == "off":
            raise ValueError("--compare scorer needs --speculative ngram or draft")
        self.each_case()

    def each_case(self) -> list[LatencyOptions]:
        """Options for each case, or these."""
        if self.cases is None:
            return [self]
        sizes = [case.split("x") for case in self.cases.split(",")]
        if not all(len(size) == 3 and all(part.isdecimal() for part in size) for size in sizes):
            raise ValueError(f"--cases must be like 8x1024x128,64x4096x64, got {self.cases!r}")
        names = ("batch", "input_len", "output_len")
        return [
            replace(self, cases=None, **dict(zip(names, map(int, size), strict=True)))
            for size in sizes
        ]

    def variants(self) -> list[LatencyOptions]:
        """The settings to run."""
        if self.compare is None:
            return [self]
        if self.compare == "scorer":
            return [replace(self, scorer=name) for name in ("multi-query", "batch-expansion")]
        if self.compare == "speculative":
            method = "ngram" if self.speculative == "off" else self.speculative
            plain = replace(self, speculative="off", draft_model=None)
            return [plain, replace(self, speculative=method)]
        return [replace(self, **{self.compare: on}) for on in (False, True)]


def run_latency(options: LatencyOptions, progress: Progress) -> RunResults:
    """A row for each setting."""
    check_choices(options)
    results = begin_results("latency", options.torch_device(), options)
    for variant in options.variants():
        cases = variant.each_case()
        longest = max(case.input_len + case.output_len for case in cases)
        sizes = variant.sized(longest, max(case.batch for case in cases))
        llm = variant.make(progress, **sizes)
        results.rows.extend(_measure(llm, case, progress) for case in cases)
        del llm
        release()
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
        progress("measuring prefill", i, min(options.iterations, MAX_PREFILLS))
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
    from anabranch.engine.sampling_params import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    prompts = random_prompts(options.batch, options.input_len, llm.engine.vocab_size, seed)
    return llm.generate(prompts, params)


def full_batch_ms(outputs: list[RequestOutput], stats: RecordedStats) -> list[float]:
    """Milliseconds between steps while every sequence decodes, none being prefilled or done."""
    times = [output.times for output in outputs if output.times]
    start = max(each.first_token or 0.0 for each in times)
    stop = min(each.last_token or 0.0 for each in times)
    landed = [step.landed for step in stats.steps if start <= step.landed <= stop]
    return [1e3 * (b - a) for a, b in pairwise(landed)]


def summarise_latencies(seconds: list[float]) -> Record:
    """Average and percentiles."""
    values = np.percentile(seconds, PERCENTILES)
    pairs = zip(PERCENTILES, values, strict=True)
    return {
        "avg_latency": mean(seconds),
        "percentiles": {str(percent): float(value) for percent, value in pairs},
    }


def latency_text(results: RunResults) -> str:
    """The lines that people expect, for each setting; ratios to the first."""
    first = results.rows[0]
    blocks: list[str] = []
    for row in results.rows:
        heading = [f"{row['setting']}, {row['case']}:"] if len(results.rows) > 1 else []
        blocks.append("\n".join([*heading, *_row_lines(row, results.options)]))
    for row in results.rows[1:]:
        if row["case"] != first["case"]:
            continue
        ratio = first["avg_latency"] / row["avg_latency"]
        blocks.append(f"{row['setting']} is {ratio:.2f}x as fast as {first['setting']}")
    return "\n\n".join([*blocks, results.where])


def _row_lines(row: Record, options: Record) -> list[str]:
    lines = [f"Avg latency: {row['avg_latency']} seconds"]
    for percent, value in row["percentiles"].items():
        lines.append(f"{percent}% percentile latency: {value} seconds")
    lines.append(f"Prefill: {row['prefill_ms']:.2f} ms")
    lines.append(f"Output token: {row['ms_an_output_token']:.3f} ms")
    if row["ms_a_step"] is not None:
        lines.append(f"Step with all sequences decoding: {row['ms_a_step']:.3f} ms")
        if options.get("tokens_a_step"):
            assumed = options["tokens_a_step"]
            taken = row["ms_a_step"] / assumed
            lines.append(f"Output token if a step emitted {assumed:g}: {taken:.3f} ms")
    if row["acceptance_rate"] is not None:
        lines.append(f"Draft acceptance rate: {row['acceptance_rate']:.3f}")
        lines.append(f"Tokens a verification: {row['tokens_a_verification']:.2f}")
    stages = (f"{name} {times['median_ms']:.3f}" for name, times in row["stages"].items())
    lines.append(f"Stages of a step, median ms: {', '.join(stages)}")
    return lines
