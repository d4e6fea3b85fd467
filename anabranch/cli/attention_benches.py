"""`anabranch bench merge | decode | verify | prefill`: attention beside its peers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Out = Annotated[
    Path | None,
    typer.Option(help="Write all rows as JSON, after every case. The README is made from "
                 "such files in benchmarks/results/ (python -m anabranch.bench.report)."),
]  # fmt: skip
Filter = Annotated[
    str, typer.Option(help="Only cases whose name, model or group has this: 'T16384', 'Qwen3'.")
]
Impl = Annotated[
    list[str] | None,
    typer.Option(help="Only implementations whose name has this: 'cuda'. May be repeated."),
]
Device = Annotated[str, typer.Option(help="'cuda' or 'cpu'; the GPU if there is one.")]
Quick = Annotated[bool, typer.Option("--quick", help="Three cases only, to see that it works.")]


def _bench(
    name: str, out: Path | None, pattern: str, impl: list[str] | None, device: str, quick: bool
) -> None:
    from anabranch.bench.__main__ import run_and_print
    from anabranch.bench.runner import Options

    options = Options(name, device, pattern, tuple(impl or ()), quick, out)
    try:
        raise typer.Exit(run_and_print(options))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def merge(
    out: Out = None,
    filter: Filter = "",
    impl: Impl = None,
    device: Device = "",
    quick: Quick = False,
) -> None:
    """Merge two states: our torch, Triton and CUDA implementations, and FlashInfer's.

    A case is tokens x heads x head dim and a dtype, as in "T613 H16 D128 float16". Times are
    microseconds in a CUDA graph and, behind the slash, called from Python. Peers are found where
    they are installed or in the folder that ANABRANCH_PEERS names.
    """
    _bench("merge", out, filter, impl, device, quick)


def decode(
    out: Out = None,
    filter: Filter = "",
    impl: Impl = None,
    device: Device = "",
    quick: Quick = False,
) -> None:
    """Attend with one query a sequence to paged keys, beside FlashAttention-3 and FlashInfer.

    A case is sequences, length, query heads / key heads and head dim, as in "B8 L8192 H32/8 D128";
    groups are table, models, context, batch and pages. The rate counts the bytes of K and V.
    """
    _bench("decode", out, filter, impl, device, quick)


def verify(
    out: Out = None,
    filter: Filter = "",
    impl: Impl = None,
    device: Device = "",
    quick: Quick = False,
) -> None:
    """Attend with a few queries a sequence, as speculative decoding does to verify a draft.

    A case is named as in decode, with the queries of a sequence: "B8 L8192 H32/8 D128 q4".
    Groups are table, queries and models.
    """
    _bench("verify", out, filter, impl, device, quick)


def prefill(
    out: Out = None,
    filter: Filter = "",
    impl: Impl = None,
    device: Device = "",
    quick: Quick = False,
) -> None:
    """Attend with whole prompts, over contiguous, ragged and paged keys, in TFLOP/s.

    A case is sequences, length and heads, as in "B1 S8192 H32/8 D128"; groups are table, models
    and context. Half of a square causal mask counts as work. The first call compiles.
    """
    _bench("prefill", out, filter, impl, device, quick)


COMMANDS = (merge, decode, verify, prefill)
