"""python -m anabranch.bench.evaluate: accuracy without typer and rich."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from anabranch.bench.engine.arguments import add_options, exit_code
from anabranch.bench.evaluate.options import EvalOptions
from anabranch.bench.evaluate.run import run_eval


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m anabranch.bench.evaluate", description=__doc__)
    add_options(parser, EvalOptions)
    given = vars(parser.parse_args(arguments))
    return exit_code(lambda: run_eval(EvalOptions(**given)))


if __name__ == "__main__":
    sys.exit(main())
