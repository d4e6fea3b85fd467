"""Steps and prompts of quantised models: this engine and vLLM's on one GPU, in turns.

    PYTHONPATH=.:SITE python benchmarks/quantised_peers.py --out FILE

SITE is a folder that vLLM was unpacked to, if it is not installed; `--peer none` does without it.
Both engines have random weights of configurations in `models/configs`, whose `quantization_config`
both read, and stay on the GPU while a case runs on one of them.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from deepseek import our_steps, seconds_left
from rows import header, save_rows
from vllm_backend import Phase, engine_options
from vllm_engine import Case, Engine

from anabranch.llm.bench.workload import random_prompts
from anabranch.llm.cli.step_times import RecordedStats
from anabranch.llm.engine.llm import LLM
from anabranch.llm.sampling.params import SamplingParams


def our_prompt_ms(llm: LLM, case: Case, seed: int) -> float:
    """Until every prompt has a token."""
    prompts = random_prompts(case.num_seqs, case.prompt, llm.engine.vocab_size, 1000 + seed)
    params = SamplingParams(temperature=1.0, max_tokens=1, ignore_eos=True)
    begin = time.perf_counter()
    llm.generate(prompts, params)
    return 1e3 * (time.perf_counter() - begin)


def run_ours(llm: LLM, case: Case, tokens: int, seed: int) -> dict[str, Any]:
    steps = our_steps(llm, case, tokens, seed, RecordedStats())
    return {"step_ms": median(steps), "prompt_ms": our_prompt_ms(llm, case, seed)}


def run_vllm(engine: Engine, case: Case, given: argparse.Namespace, seed: int) -> dict[str, Any]:
    found = engine.run(case, given.tokens, seed, seconds_left(given), 1.0)
    prompt = engine.run(case, 1, 1000 + seed, seconds_left(given), 1.0)
    return {"step_ms": found["step_ms"], "prompt_ms": prompt["total_ms"]}


def start_peer(given: argparse.Namespace, cases: list[Case], model: str, folder: Path) -> Engine:
    """A process of vLLM's with one model."""
    own = argparse.Namespace(**vars(given) | {"model": model})
    phase = Phase("quantised", cases, 0, int(given.cache_gib * 2**30))
    options = engine_options(own, phase, given.peer, folder)
    options["gpu_memory_utilization"] = 0.15  # that must be free at its start
    if given.peer == "auto":
        del options["attention_backend"]
    return Engine(f"vllm {model}", options, given.logs / f"{model}.log")


def start_ours(given: argparse.Namespace, cases: list[Case], model: str) -> LLM:
    return LLM(
        f"dummy:{model}",
        device="cuda",
        max_model_len=max(case.prompt for case in cases) + given.tokens + 16,
        max_num_seqs=max(case.num_seqs for case in cases),
        max_num_batched_tokens=given.max_num_batched_tokens,
        kv_cache_gib=given.cache_gib,
        prefix_caching=False,
    )


def measure(given: argparse.Namespace, cases: list[Case], folder: Path) -> list[dict[str, Any]]:
    """A row for each model, case, engine and turn; the first turn warms up and is left out.

    All engines are started at once, and wait while one of them runs.
    """
    names = given.models.split(",")
    peers: dict[str, Engine] = {}
    rows: list[dict[str, Any]] = []
    try:
        if given.peer != "none":
            for name in names:  # one by one: those that started are stopped when another fails
                peers[name] = start_peer(given, cases, name, folder)
        ours = {name: start_ours(given, cases, name) for name in names}
        ready: dict[str, Engine] = {}
        for name, engine in peers.items():
            try:
                started = engine.receive(seconds_left(given) - 60)
            except SystemExit as error:  # the others are measured
                print(error, flush=True)
                continue
            print(name, started, f"{seconds_left(given):.0f} s left", flush=True)
            ready[name] = engine
        for name, turn in ((name, turn) for name in names for turn in range(given.rounds + 1)):
            for case in cases:
                if seconds_left(given) < given.spare:
                    return rows
                found = {"anabranch": run_ours(ours[name], case, given.tokens, turn)}
                if name in ready:
                    found["vllm"] = run_vllm(ready[name], case, given, turn)
                if turn:
                    about = {"model": name, "case": str(case)}
                    rows += [{**about, "engine": e, **f} for e, f in found.items()]
                print(name, turn, case, found, flush=True)
        return rows
    finally:
        for engine in peers.values():
            engine.stop()


def table(rows: list[dict[str, Any]]) -> str:
    """Medians of each case; ratios of vLLM's time to ours, above 1 where ours is shorter."""
    lines = [f"{'':34}{'step ms, ours / vLLM':>28}{'ratio':>8}{'prompts':>26}{'ratio':>8}"]
    for model, case in dict.fromkeys((row["model"], row["case"]) for row in rows):
        cells = f"{model:24}{case:10}"
        for field in ("step_ms", "prompt_ms"):
            ours, theirs = (
                [
                    row[field]
                    for row in rows
                    if (row["model"], row["case"], row["engine"]) == (model, case, name)
                ]
                for name in ("anabranch", "vllm")
            )
            middle = median(theirs) if theirs else float("nan")
            times = f"{median(ours):.3f} / {middle:.3f}"
            cells += f"{times:>28}{middle / median(ours):8.3f}"
        lines.append(cells)
    return "\n".join(lines)


def main() -> None:
    """Run both engines, print the table, write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="llama-3.1-8b-fp8,llama-3.1-8b-int4")
    parser.add_argument("--peer", default="auto", help="a backend of vLLM, auto or none")
    parser.add_argument("--cases", default="1x1024,8x1024,64x1024")
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--cache-gib", type=float, default=9.5)
    parser.add_argument("--seconds", type=float, default=300, help="for everything")
    parser.add_argument("--spare", type=float, default=15, help="seconds left to stop at")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    given.eager, given.end = False, time.monotonic() + given.seconds
    cases = [Case.parse(case) for case in given.cases.split(",")]
    torch.cuda.init()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(given, cases, Path(folder))
    print(table(rows))
    save_rows(given.out, header(given.models), rows)


if __name__ == "__main__":
    main()
