"""Decode steps of DeepSeek-V2-Lite: this engine, vLLM's, and what takes the time of a step.

    PYTHONPATH=.:SITE python benchmarks/deepseek.py --out deepseek.json

SITE is a folder that vLLM was unpacked to, if it is not installed; `--peer none` does without it.
Both engines have random weights of one shape and run one after the other on the same GPU.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from vllm_backend import Phase, engine_options
from vllm_engine import Case, Engine, kernel_ms

from anabranch.llm.bench.latency import full_batch_ms
from anabranch.llm.bench.run_results import begin_results
from anabranch.llm.bench.workload import random_prompts, release_memory
from anabranch.llm.cli.step_times import RecordedStats
from anabranch.llm.engine.llm import LLM
from anabranch.llm.sampling.params import SamplingParams

# Tokens are drawn: with random weights, the most probable one would soon be the same in all
# sequences, and a few experts would have all of them.
TEMPERATURE = 1.0
PROFILED = (42, 58)  # steps: prompts of 64 x 4096 are done, and no sequence is
# The first list with a word that occurs in the name of a kernel is the share it counts for.
SHARES = {
    "experts": (
        *("expert", "gate_row", "project_row", "topk", "TopK", "radixSort", "scatter"),
        *("moe", "Moe"),
    ),
    "attention": (
        *("attend", "latent", "merge", "append_kv", "schedule", "order_kernel"),
        *("flash", "Flash", "mla", "concat_and_cache"),
    ),
}


@dataclass(slots=True)
class ProfiledStats(RecordedStats):
    """Counts of an engine that is profiled in some of its steps."""

    profiler: profile = field(default_factory=lambda: profile(activities=[ProfilerActivity.CUDA]))

    def add_times(self, times: dict[str, float]) -> None:
        RecordedStats.add_times(self, times)
        if len(self.steps) in PROFILED:
            torch.cuda.synchronize()
            (self.profiler.start if len(self.steps) == PROFILED[0] else self.profiler.stop)()


def our_steps(
    llm: LLM, case: Case, num_tokens: int, seed: int, stats: RecordedStats
) -> list[float]:
    """Milliseconds between steps in which all sequences decode."""
    llm.engine.stats = stats
    params = SamplingParams(temperature=TEMPERATURE, max_tokens=num_tokens, ignore_eos=True)
    prompts = random_prompts(case.num_seqs, case.prompt, llm.engine.vocab_size, seed)
    return full_batch_ms(llm.generate(prompts, params), stats)


def our_shares(llm: LLM, case: Case, num_tokens: int) -> dict[str, float]:
    """Of a step of this engine."""
    stats = ProfiledStats()
    our_steps(llm, case, num_tokens, 0, stats)
    return shares(kernel_ms(stats.profiler, *PROFILED))


def shares(kernels: dict[str, float]) -> dict[str, float]:
    """Milliseconds of each share, in a step in which all sequences decode."""
    found = dict.fromkeys([*SHARES, "rest"], 0.0)
    for key, ms in kernels.items():
        kinds = (kind for kind, words in SHARES.items() if any(w in key for w in words))
        found[next(kinds, "rest")] += ms
    for key, ms in sorted(kernels.items(), key=lambda item: -item[1])[:16]:
        print(f"{ms:9.3f} ms  {key[:90]}")
    return found


def run_ours(given: argparse.Namespace, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """A row for each case."""
    begin = time.perf_counter()
    llm = LLM(
        f"dummy:{given.model}",
        device="cuda",
        max_model_len=max(case.prompt for case in cases) + given.tokens + 16,
        max_num_seqs=max(case.num_seqs for case in cases),
        kv_cache_gib=given.cache_gib,
        prefix_caching=False,
    )
    print(f"the engine started in {time.perf_counter() - begin:.1f} s", flush=True)
    rows: list[dict[str, Any]] = []
    for case in cases:
        our_steps(llm, case, 6, 99, RecordedStats())
        steps = [
            step
            for turn in range(given.rounds)
            for step in our_steps(llm, case, given.tokens, turn, RecordedStats())
        ]
        row = {"case": str(case), "engine": "anabranch", "step_ms": median(steps)}
        rows.append(row | {"shares": our_shares(llm, case, given.tokens)})
        print(rows[-1], flush=True)
    return rows


def run_vllm(given: argparse.Namespace, cases: list[Case], folder: Path) -> list[dict[str, Any]]:
    """A row for each case, by vLLM's own attention over latent rows."""
    phase = Phase("deepseek", cases, 0, int(given.cache_gib * 2**30))
    options = engine_options(given, phase, given.peer, folder)
    if given.peer == "auto":
        del options["attention_backend"]
    engine = Engine(given.peer, options, folder / "vllm.log")
    try:
        print(engine.receive(seconds_left(given)), flush=True)
        rows: list[dict[str, Any]] = []
        for case in cases:
            engine.run(case, 6, 0, seconds_left(given), TEMPERATURE)
            found = [
                engine.run(case, given.tokens, turn + 1, seconds_left(given), TEMPERATURE)
                for turn in range(given.rounds)
            ]
            step = median(one["step_ms"] for one in found)
            row = {"case": str(case), "engine": f"vllm {given.peer}", "step_ms": step}
            last = engine.run(case, given.tokens, 0, seconds_left(given), TEMPERATURE, PROFILED)
            rows.append(row | {"shares": shares(last["kernels"])})
            print(rows[-1], flush=True)
        return rows
    finally:
        engine.stop()


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each row, with the time beside the last engine's and the shares of a step."""
    lines = [f"{'case':10}{'engine':24}{'step ms':>9}{'ratio':>8}  shares, ms"]
    for row in rows:
        peer = [other["step_ms"] for other in rows if other["case"] == row["case"]][-1]
        parts = ", ".join(f"{name} {ms:.3f}" for name, ms in row.get("shares", {}).items())
        ratio = row["step_ms"] / peer
        lines.append(
            f"{row['case']:10}{row['engine']:24}{row['step_ms']:9.3f}{ratio:8.3f}  {parts}"
        )
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="deepseek-v2-lite")
    parser.add_argument("--peer", default="auto", help="a backend of vLLM, auto or none")
    parser.add_argument("--cases", default="1x1024,64x4096")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--cache-gib", type=float, default=16)
    parser.add_argument("--seconds", type=float, default=540, help="for everything")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.tokens < PROFILED[1] + 2:
        parser.error(f"--tokens must be at least {PROFILED[1] + 2}, got {given.tokens}")
    given.eager, given.end = False, time.monotonic() + given.seconds
    return given


def seconds_left(given: argparse.Namespace) -> float:
    """Of those given for everything."""
    return given.end - time.monotonic()


def main() -> None:
    """Run both engines, print the table, write the rows."""
    given = parse()
    cases = [Case.parse(case) for case in given.cases.split(",")]
    results = begin_results("deepseek", torch.device("cuda"), given)
    rows = run_ours(given, cases)
    release_memory()
    if given.peer != "none":
        with tempfile.TemporaryDirectory() as folder:
            rows += run_vllm(given, cases, Path(folder))
    print(table(rows))
    if given.out is not None:
        results.rows.extend(rows)
        results.save(given.out)


if __name__ == "__main__":
    main()
