"""The `anabranch bench` commands: options and help. What they run is imported when it runs."""

# ruff: noqa: RUF009 - `option` is a field

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import typer

from anabranch.bench.engine.bench_options import (
    CpuOptions,
    LatencyOptions,
    ScorersOptions,
    SweepOptions,
    ThroughputOptions,
    TreeOptions,
)
from anabranch.bench.serve.load_options import LoadOptions, SoakOptions
from anabranch.llm.cli.engine_options import EngineOptions
from anabranch.llm.cli.options import add_command, new_app, option

ATTENTION = {
    "merge": """Time the merge of two states: torch, Triton, CUDA and FlashInfer.

A case is tokens, heads, head dim and dtype: "T613 H16 D128 float16". Times are microseconds in a
CUDA graph and, after the slash, called from Python.
""",
    "decode": """Time one query a sequence over paged keys, beside FlashAttention-3 and FlashInfer.

A case is sequences, length, query heads / key heads and head dim: "B8 L8192 H32/8 D128". The rate
counts the bytes of K and V.
""",
    "verify": """Time a few queries a sequence, as speculative decoding verifies drafts.

A case is named as in decode, with the queries of a sequence: "B8 L8192 H32/8 D128 q4".
""",
    "prefill": """Time whole prompts over contiguous, ragged and paged keys, in TFLOP/s.

A case is sequences, length and heads: "B1 S8192 H32/8 D128". Half of a causal mask is work.
""",
    "sparse": "Time attention to listed keys, beside torch's gather and dense decode.",
    "cascade": "Time decode over shared prefixes, beside flat decode and FlashInfer's cascade.",
    "tree": "Time the verification of draft trees, beside plain decode and chains.",
}
BENCHES: dict[str, type[EngineOptions]] = {
    "latency": LatencyOptions,
    "throughput": ThroughputOptions,
    "sweep": SweepOptions,
    "scorers": ScorersOptions,
    "cpu": CpuOptions,
    "drafts": TreeOptions,
    "serve": LoadOptions,
    "soak": SoakOptions,
}


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """Which cases and implementations to run; empty means all."""

    out: Path | None = option(None, "Write all rows as JSON, after every case.")
    filter: str = option("", "Only cases whose name, model or group has this: 'Qwen3'.")
    impl: tuple[str, ...] = option(
        (), "Only implementations whose name has this: 'cuda'. May be repeated."
    )
    device: str = option("", "cuda or cpu; the GPU if there is one.")
    quick: bool = option(False, "Three cases only, to see that it works.")


def _run_attention(name: str, options: AttentionOptions) -> None:
    from anabranch.bench.case_runner import run_and_print

    if not run_and_print(name, options):
        raise typer.Exit(1)


def _run_bench(name: str, options: EngineOptions) -> None:
    from anabranch.bench.benches import run_and_print

    run_and_print(name, options)


app = new_app(
    """Time this library beside its peers on this machine.

    merge, decode, verify, prefill, sparse, cascade and tree time attention; each implementation is
    checked against float64 first, and a wrong one is reported and not timed. latency, throughput,
    sweep, scorers and cpu time the engine, drafts counts tokens. serve and soak load a server.
    """
)
for _name, _help in ATTENTION.items():
    add_command(app, _name, AttentionOptions, partial(_run_attention, _name), _help)
for _name, _options in BENCHES.items():
    add_command(app, _name, _options, partial(_run_bench, _name))
