"""The `anabranch` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

try:
    import typer
except ImportError as missing:
    raise SystemExit(
        "the anabranch command needs typer and rich: pip install 'anabranch[bench]'\n"
        "(python -m anabranch.bench runs the benchmarks without them)"
    ) from missing

app = typer.Typer(
    help="Attention as partial states and one exact merge.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
bench = typer.Typer(
    help="Time this library beside its peers on this machine. Every implementation is checked "
    "against float64 first; a wrong one is reported and never timed.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
app.add_typer(bench, name="bench")

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


@bench.command()
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


@bench.command()
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


@bench.command()
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


@bench.command()
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


def main() -> None:
    """Entry point of the installed command."""
    app()
