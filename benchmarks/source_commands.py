"""The `anabranch bench` commands that need the source tree: attention, and studies of the engine.

What they run is imported when it runs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import typer
from attention_bench.attention_options import AttentionOptions
from engine_bench.source_options import CpuOptions, ScorersOptions, SoakOptions, TreeOptions

from anabranch.llm.cli.engine_options import EngineOptions
from anabranch.llm.cli.options import add_command

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
ENGINE: dict[str, type[EngineOptions]] = {
    "scorers": ScorersOptions,
    "cpu": CpuOptions,
    "drafts": TreeOptions,
    "soak": SoakOptions,
}


def add_commands(app: typer.Typer) -> None:
    for name, text in ATTENTION.items():
        add_command(app, name, AttentionOptions, partial(_run_attention, name), text)
    for name, options in ENGINE.items():
        add_command(app, name, options, partial(_run_engine, name))


def _run_attention(name: str, options: AttentionOptions) -> None:
    from attention_bench.case_runner import run_and_print

    if not run_and_print(name, options):
        raise typer.Exit(1)


def _run_engine(name: str, options: Any) -> None:
    from engine_bench.studies import STUDIES

    from anabranch.llm.bench.benches import run_and_print

    run_and_print(STUDIES[name], options)
