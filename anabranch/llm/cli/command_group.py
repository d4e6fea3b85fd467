"""All commands by name. A command's module is imported when the command is used or listed."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from anabranch.llm.cli.options import new_app

HELP = """Run language models on partial attention states, serve them, and measure both.

Start with: anabranch generate "Why do rivers meander?"
"""
MODULES = {
    "generate": "anabranch.llm.cli.generate",
    "serve": "anabranch.llm.cli.serve",
    "quantize": "anabranch.llm.cli.quantize",
    "bench": "anabranch.llm.bench.commands",
}


class CommandGroup(TyperGroup):
    """The commands of MODULES; each module holds its command as `app`."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(MODULES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import a command, or None if there is none of that name."""
        if cmd_name not in MODULES:
            return None
        command = typer.main.get_command(import_module(MODULES[cmd_name]).app)
        command.name = cmd_name
        return command


app = new_app(HELP, cls=CommandGroup, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        from anabranch import __version__

        typer.echo(f"anabranch {__version__}")
        raise typer.Exit


@app.callback(help=HELP)
def anabranch(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Options of the command itself."""
