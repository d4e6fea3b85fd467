"""Steps and a prompt of this engine alone: models in 16 bits and with quantised weights, in turns.

    PYTHONPATH=. python benchmarks/quantised_steps.py --out FILE

Models separated by commas are loaded side by side, a process each, and timed in turns once all are
ready; those after a blank when these are done. Weights are random; a model may be a GGUF file.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from deepseek import our_steps
from quantised_peers import our_prompt_ms
from rows import header, save_rows
from vllm_engine import Case

MODELS = [
    "llama-3.1-8b,llama-3.1-8b-fp8,llama-3.1-8b-int4",
    "deepseek-v2-lite,deepseek-v2-lite-fp8",
]


def serve(connection: Connection, model: str, given: argparse.Namespace, cases: list[Case]) -> None:
    """A process with one engine: a seed comes in, a turn's figures go out; an error as its text."""
    from anabranch.llm.cli.step_times import RecordedStats
    from anabranch.llm.engine.llm import LLM

    try:
        begin = time.perf_counter()
        llm = LLM(
            model if model.endswith(".gguf") else f"dummy:{model}",
            device=given.device,
            max_model_len=max(case.prompt for case in cases) + given.tokens + 16,
            max_num_seqs=max(case.num_seqs for case in cases),
            kv_cache_gib=given.cache_gib,
            prefix_caching=False,
        )
        connection.send({"start_s": time.perf_counter() - begin})
        while (seed := connection.recv()) is not None:
            found: dict[str, float] = {"prompt_ms": our_prompt_ms(llm, cases[0], seed)}
            for case in cases:
                steps = our_steps(llm, case, given.tokens, seed, RecordedStats())
                found[str(case)] = median(steps)
            connection.send(found)
    except Exception:
        connection.send({"error": traceback.format_exc()})


def receive(connection: Connection, model: str, end: float) -> dict[str, Any]:
    if not connection.poll(max(end - time.monotonic(), 0)):
        raise TimeoutError(f"{model} has not answered in time")
    found = connection.recv()
    if "error" in found:
        raise RuntimeError(f"{model}: {found['error']}")
    return found


def measure(
    models: list[str], given: argparse.Namespace, cases: list[Case]
) -> list[dict[str, Any]]:
    """A row for each model: medians of its turns, the first of which warms up."""
    context = mp.get_context("spawn")
    pairs = [context.Pipe() for _ in models]
    processes = [
        context.Process(target=serve, args=(theirs, model, given, cases), daemon=True)
        for model, (_, theirs) in zip(models, pairs, strict=True)
    ]
    for process in processes:
        process.start()
    ours = {model: own for model, (own, _) in zip(models, pairs, strict=True)}
    try:
        starts = {model: receive(own, model, given.end)["start_s"] for model, own in ours.items()}
        print({model: round(seconds, 1) for model, seconds in starts.items()}, flush=True)
        turns: dict[str, list[dict[str, float]]] = {model: [] for model in models}
        for seed in range(given.rounds + 1):
            for model, own in ours.items():
                own.send(seed)
                turns[model].append(receive(own, model, given.end))
        for own in ours.values():
            own.send(None)
        return [
            {"model": model, "start_s": starts[model]}
            | {key: median(turn[key] for turn in found[1:]) for key in found[0]}
            for model, found in turns.items()
        ]
    finally:
        for process in processes:
            process.join(5)
            process.kill()


def main() -> None:
    """Run all models, print a row for each as soon as it is there, write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--cases", default="1x1024,8x1024,64x1024", help="the prompt is the first's"
    )
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cache-gib", type=float, default=10)
    parser.add_argument("--seconds", type=float, default=240, help="for everything")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    given.end = time.monotonic() + given.seconds
    cases = [Case.parse(case) for case in given.cases.split(",")]
    rows: list[dict[str, Any]] = []
    for group in given.models:
        rows += measure(group.split(","), given, cases)
        for row in rows[-len(group.split(",")) :]:
            print(json.dumps(row), flush=True)
        timing = "milliseconds of steps of so many sequences x tokens of a prompt, medians of turns"
        save_rows(given.out, {**header(), "timing": timing}, rows)


if __name__ == "__main__":
    main()
