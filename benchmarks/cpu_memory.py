"""Memory of a process on a CPU after an answer, by what holds it; Linux.

    python benchmarks/cpu_memory.py --out memory.json

Bytecode is compiled once before, as it is where the package is installed.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from cpu_peers import about

MAPPING = re.compile(
    r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \d+[ \t]*(.*)\n((?:\w+:.*\n)+)", re.MULTILINE
)
GROUPS = {
    "weights": r"\.packed$",
    "cache": r"/dev/zero",  # of keys and values: the pages that were written
    "torch": r"/torch/",
    "other files": "^/",
    "heap": "",
}


def memory() -> dict[str, float]:
    """Resident MiB of this process by group."""
    found = dict.fromkeys(GROUPS, 0.0)
    for path, facts in MAPPING.findall(Path("/proc/self/smaps").read_text()):
        group = next(name for name, pattern in GROUPS.items() if re.search(pattern, path))
        resident = re.search(r"^Rss: +(\d+)", facts, re.MULTILINE)
        found[group] += int(resident[1]) / 1024 if resident else 0
    return found


def child(tokens: int) -> None:
    """Print the memory after importing torch and after an answer."""
    import torch

    steps = {"torch " + torch.__version__: memory()}
    from anabranch import LLM, SamplingParams

    llm = LLM("smollm2", device="cpu")
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    llm.generate("Once upon a time", params)
    print(json.dumps(steps | {"an answer": memory()}))


def main() -> None:
    """Run a process some times, print a table, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.tokens)
        return
    command = [sys.executable, __file__, "--child", "--tokens", str(options.tokens)]
    runs: list[dict[str, dict[str, float]]] = []
    for _ in range(options.rounds + 1):
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        runs.append(json.loads(run.stdout.splitlines()[-1]))
    rows: list[dict[str, Any]] = []
    for step in runs[0]:
        samples = [sum(run[step].values()) - beside(run[step]) for run in runs[1:]]
        median = sorted(samples)[len(samples) // 2]
        groups = runs[1 + samples.index(median)][step]
        rows.append({"after": step, "MiB": median, "groups": groups, "samples": samples})
        shares = ", ".join(f"{name} {size:.1f}" for name, size in groups.items())
        print(f"after {step}: {median:.1f} MiB beside weights and cache ({shares})")
    if options.out:
        results = about() | {"bench": "cpu-memory", "tokens": options.tokens, "rows": rows}
        options.out.write_text(json.dumps(results, indent=1) + "\n")


def beside(groups: dict[str, float]) -> float:
    """What grows with the model and the context."""
    return groups["weights"] + groups["cache"]


if __name__ == "__main__":
    main()
