"""GGUF files on a CPU beside llama.cpp: decoding, batches, prompts, memory; in turns.

    python benchmarks/gguf_peers.py --peer LLAMA_CPP_PYTHON_VENV/bin/python FILE.gguf ...

Both engines get the same token ids, decode greedily and stay loaded while turns alternate; the
table has medians of rates and the median of ratios within a turn. `--realtime` (as root) gives
whoever's turn it is the cores, on a machine that others use.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

OURS, PEER = "anabranch", "llama.cpp"
MARK = "@"  # begins lines that are meant for the parent
# name: sequences, tokens of a prompt, new tokens
CASES = {"decode": (1, 16, 64), "batch 8": (8, 16, 32), "prompt 512": (1, 512, 1)}
NUM_THREADS = len(os.sched_getaffinity(0))


def prompts_of(batch: int, length: int) -> list[list[int]]:
    """Token ids that every vocabulary has, others in every sequence."""
    return [[100 + (31 * i + 977 * seq) % 1900 for i in range(length)] for seq in range(batch)]


def load_ours(path: str, options: dict[str, Any]) -> Any:
    """A function of prompts and a number of tokens."""
    from anabranch import LLM, SamplingParams

    given: dict[str, Any] = {"max_num_seqs": 8, "prefix_caching": False, "device": "cpu"}
    llm = LLM(path, **given, **options)

    def generate(prompts: list[list[int]], tokens: int) -> object:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, speculate=False)
        return llm.generate(prompts, params)

    return generate


def load_peer(path: str) -> Any:
    """The same by the C interface: one batch a step, the largest logit of each sequence."""
    import llama_cpp as api  # pyright: ignore[reportMissingImports]
    import numpy as np

    api.llama_backend_init()
    model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
    params = api.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 8192, 1024, 512, 8
    params.n_threads = params.n_threads_batch = NUM_THREADS
    context = api.llama_init_from_model(model, params)
    vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    batch = api.llama_batch_init(1024, 0, 1)

    def add(token: int, position: int, seq: int, wanted: bool) -> None:
        at = batch.n_tokens
        batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, position, 1
        batch.seq_id[at][0], batch.logits[at] = seq, wanted
        batch.n_tokens += 1

    def largest(index: int) -> int:
        row = api.llama_get_logits_ith(context, index)
        return int(np.ctypeslib.as_array(row, (vocab,)).argmax())

    def generate(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        api.llama_memory_clear(api.llama_get_memory(context), True)
        outputs: list[list[int]] = [[] for _ in prompts]
        for step in range(tokens):
            batch.n_tokens = 0
            for seq, prompt in enumerate(prompts):
                new = prompt if not step else outputs[seq][-1:]
                for i, token in enumerate(new):
                    position = len(prompt) + step - len(new) + i if step else i
                    add(token, position, seq, i + 1 == len(new))
            if api.llama_decode(context, batch):
                raise RuntimeError("llama_decode failed")
            ends = [i for i in range(batch.n_tokens) if batch.logits[i]]
            for seq, end in enumerate(ends):
                outputs[seq].append(largest(end))
        return outputs

    return generate


def child(name: str, path: str, realtime: bool, options: dict[str, Any]) -> None:
    """Answer names of cases with the seconds they took and the memory of the process."""
    generate = load_ours(path, options) if name == OURS else load_peer(path)
    for batch, length, _ in CASES.values():
        generate(prompts_of(batch, length), 2)
    package = "anabranch" if name == OURS else "llama-cpp-python"
    print(MARK + json.dumps({package: version(package)}), flush=True)
    for line in sys.stdin:
        batch, length, tokens = CASES[line.strip()]
        prompts = prompts_of(batch, length)
        if realtime:
            schedule(os.SCHED_RR, 1)
        start = time.perf_counter()
        generate(prompts, tokens)
        seconds = time.perf_counter() - start
        if realtime:
            schedule(os.SCHED_OTHER, 0)
        status = Path("/proc/self/status").read_text()
        resident = int(status.partition("VmRSS:")[2].split()[0]) / 1024
        answer = {"rate": batch * max(tokens, length * (tokens == 1)) / seconds, "MB": resident}
        print(MARK + json.dumps(answer), flush=True)


def schedule(policy: int, priority: int) -> None:
    """Of all threads of this process."""
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setscheduler(int(thread.name), policy, os.sched_param(priority))


class Engine:
    """A child process, loaded and waiting for its turn."""

    def __init__(self, name: str, python: str, path: str, options: argparse.Namespace) -> None:
        flags = ["--realtime"] if options.realtime else []
        command = [python, __file__, "--child", name, path, *flags, "--given", options.given]
        apart = {"PYTHONPATH"} if name == PEER else set[str]()
        environment = {key: os.environ[key] for key in os.environ.keys() - apart}
        pipe, none = subprocess.PIPE, subprocess.DEVNULL
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=none, text=True, env=environment
        )
        self.version = json.loads(self._read())

    def run(self, case: str) -> dict[str, float]:
        """Tokens a second of a case, and megabytes."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{case}\n")
        self._process.stdin.flush()
        return json.loads(self._read())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                return line.removeprefix(MARK)
        raise SystemExit("an engine ended before it answered")


def compare(path: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for every case: medians, and the median of ratios."""
    engines: dict[str, Engine] = {}
    rates: dict[tuple[str, str], list[float]] = {}
    memory: dict[str, float] = {}
    try:
        for name, python in ((OURS, sys.executable), (PEER, options.peer)):
            engines[name] = Engine(name, python, path, options)
        for turn in range(options.rounds):
            for case in CASES:
                for name in sorted(engines, reverse=bool(turn % 2)):
                    answer = engines[name].run(case)
                    rates.setdefault((case, name), []).append(answer["rate"])
                    memory[name] = answer["MB"]
    finally:
        for engine in engines.values():
            engine.close()
    rows: list[dict[str, Any]] = []
    for case in CASES:
        pairs = zip(rates[case, OURS], rates[case, PEER], strict=True)
        row: dict[str, Any] = {"file": Path(path).name, "case": case}
        row |= {name: median(rates[case, name]) for name in engines}
        row |= {"ratio": median(ours / peer for ours, peer in pairs), "MB": memory}
        row |= {"versions": {name: engine.version for name, engine in engines.items()}}
        rows.append(row)
    return rows


def about() -> dict[str, Any]:
    """What the rows hold for."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    today = datetime.now(UTC).date().isoformat()
    return {"bench": "gguf-peers", "commit": commit, "date": today, "threads": NUM_THREADS}


def main() -> None:
    """Run, print a table, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", help="GGUF files")
    parser.add_argument("--peer", help="Python interpreter that has llama-cpp-python")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--realtime", action="store_true", help="real-time priority, as root")
    parser.add_argument("--given", default="{}", help="more options of our engine, as JSON")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", choices=(OURS, PEER), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.files[0], options.realtime, json.loads(options.given))
        return
    if not options.peer:
        parser.error("--peer is needed")
    rows: list[dict[str, Any]] = []
    for path in options.files:
        for row in compare(path, options):
            rows.append(row)
            ours, peer, memory = row[OURS], row[PEER], row["MB"]
            print(
                f"{row['file']:24} {row['case']:10} {ours:8.1f} tokens/s, {PEER} {peer:8.1f}, "
                f"{row['ratio']:.2f}x; {memory[OURS]:.0f} MB, {memory[PEER]:.0f} MB",
                flush=True,
            )
    if options.out:
        results = about() | {"rounds": options.rounds, "realtime": options.realtime, "rows": rows}
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
