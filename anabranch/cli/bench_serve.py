"""`anabranch bench serve`: load on an OpenAI endpoint."""

from __future__ import annotations

from anabranch.bench.serve.command import HELP, run_and_show
from anabranch.bench.serve.options import ServeOptions
from anabranch.cli.from_options import command_of

__all__ = ["HELP", "command"]

command = command_of(ServeOptions, run_and_show)
