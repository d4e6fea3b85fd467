"""Every command in its place."""

from __future__ import annotations

import typer

from anabranch.bench.engine.benches import BENCHES, run_bench
from anabranch.bench.engine.engine_options import BenchOptions
from anabranch.cli import attention_benches, bench_serve, evaluate
from anabranch.cli.from_options import command_of
from anabranch.cli.generate import HELP, GenerateOptions, generate
from anabranch.cli.serve import HELP as SERVE_HELP
from anabranch.cli.serve import ServeCommandOptions, serve


def as_markdown(text: str) -> str:
    """Indented examples as a list: typer takes indentation away before it reads markdown."""
    lines = text.splitlines()
    return "\n".join(f"- `{line.strip()}`" if line.startswith("    ") else line for line in lines)


app = typer.Typer(
    help="Attention as partial states and one exact merge, and an engine on top of it. "
    'Begin with `anabranch generate "Why do rivers meander?"`.',
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
bench = typer.Typer(
    help="Time this library beside its peers on this machine. "
    "merge, decode, verify and prefill time attention alone: every implementation is checked "
    "against float64 first; a wrong one is reported and never timed. "
    "latency, throughput, sweep, scorers and cpu time the engine; serve times a server, and "
    "soak keeps one busy.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
app.add_typer(bench, name="bench")
app.command("generate", help=as_markdown(HELP))(command_of(GenerateOptions, generate))
app.command("serve", help=as_markdown(SERVE_HELP))(command_of(ServeCommandOptions, serve))
app.command("eval", help=as_markdown(evaluate.HELP))(evaluate.evaluate)
for command in attention_benches.COMMANDS:
    bench.command()(command)


def _add_engine_bench(name: str) -> None:
    def run(options: BenchOptions) -> None:
        run_bench(name, options)

    bench.command(name, help=as_markdown(BENCHES[name].help))(
        command_of(BENCHES[name].options, run)
    )


for name in BENCHES:
    _add_engine_bench(name)
bench.command("serve", help=as_markdown(bench_serve.HELP))(bench_serve.command)
bench.command("soak", help=as_markdown(bench_serve.SOAK_HELP))(bench_serve.soak)
