"""The `anabranch bench` commands: options and help. What they run is imported when it runs.

latency, throughput, sweep and serve are of the wheel. The others lie in `benchmarks/` of the source
tree, and where that is not there they say so.
"""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

import anabranch
from anabranch.llm.bench.bench_options import LatencyOptions, SweepOptions, ThroughputOptions
from anabranch.llm.bench.serve.load_options import LoadOptions
from anabranch.llm.cli.engine_options import EngineOptions
from anabranch.llm.cli.options import add_command, new_app

HELP = """Time this library beside its peers on this machine.

latency, throughput and sweep time the engine, serve loads a server. The other commands need the
source tree. merge, decode, verify, prefill, sparse, cascade and tree time attention; each
implementation is checked against float64 first, and a wrong one is reported and not timed. scorers
and cpu time the engine, drafts counts tokens, soak keeps a server busy.
"""
OPTIONS: dict[str, type[EngineOptions]] = {
    "latency": LatencyOptions,
    "throughput": ThroughputOptions,
    "sweep": SweepOptions,
    "serve": LoadOptions,
}
ATTENTION = ("merge", "decode", "verify", "prefill", "sparse", "cascade", "tree")
IN_SOURCE_TREE = (*ATTENTION, "scorers", "cpu", "drafts", "soak")
SOURCE_TREE = Path(anabranch.__file__).parents[1] / "benchmarks"
COMMANDS_THERE = "source_commands"  # a module; other packages have a folder `benchmarks`, too
HOW = "clone the repository and pip install --editable '.[bench]' there"
ANY_OPTIONS = {"ignore_unknown_options": True, "allow_extra_args": True}


def make_app(source_tree: Path = SOURCE_TREE) -> typer.Typer:
    """All commands; those of the source tree run if it is there."""
    app = new_app(HELP)
    for name, options in OPTIONS.items():
        add_command(app, name, options, partial(_run, name))
    if (source_tree / f"{COMMANDS_THERE}.py").is_file():
        if str(source_tree) not in sys.path:
            sys.path.append(str(source_tree))
        import_module(COMMANDS_THERE).add_commands(app)
        return app
    for name in IN_SOURCE_TREE:
        _add_refusal(app, name)
    return app


def _run(name: str, options: Any) -> None:
    from anabranch.llm.bench.benches import BENCHES, run_and_print

    run_and_print(BENCHES[name], options)


def _add_refusal(app: typer.Typer, name: str) -> None:
    """A command that takes all options and says what is missing."""

    @app.command(name, help="Needs the source tree.", context_settings=ANY_OPTIONS)
    def _() -> None:  # pyright: ignore[reportUnusedFunction]
        typer.echo(f"error: anabranch bench {name} needs the source tree; {HOW}", err=True)
        raise typer.Exit(2)


app = make_app()
