"""`anabranch bench serve` and `soak`: load on an OpenAI endpoint."""

from __future__ import annotations

from anabranch.bench.serve import soak as soaking
from anabranch.bench.serve.command import HELP, run_and_show
from anabranch.bench.serve.options import ServeOptions
from anabranch.bench.serve.soak_options import SoakOptions
from anabranch.cli.from_options import command_of

__all__ = ["HELP", "SOAK_HELP", "command", "soak"]

SOAK_HELP = soaking.HELP
command = command_of(ServeOptions, run_and_show)
soak = command_of(SoakOptions, soaking.run_and_show)
