"""python -m anabranch.bench.serve: the load generator without typer and rich."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from anabranch.bench.engine.arguments import add_options, exit_code
from anabranch.bench.serve.command import HELP, run_and_show
from anabranch.bench.serve.options import ServeOptions


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        prog="python -m anabranch.bench.serve",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser, ServeOptions)
    given = vars(parser.parse_args(arguments))
    return exit_code(lambda: run_and_show(ServeOptions(**given)))


if __name__ == "__main__":
    sys.exit(main())
