"""python -m anabranch.bench.engine BENCH: the engine's benchmarks without typer and rich."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from anabranch.bench.engine.arguments import add_options, exit_code
from anabranch.bench.engine.benches import BENCHES, run_bench


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m anabranch.bench.engine", description=__doc__)
    commands = parser.add_subparsers(dest="bench", required=True)
    for name, bench in BENCHES.items():
        command = commands.add_parser(
            name,
            help=bench.help.splitlines()[0],
            description=bench.help,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add_options(command, bench.options)
    given = vars(parser.parse_args(arguments))
    name = given.pop("bench")
    return exit_code(lambda: run_bench(name, BENCHES[name].options(**given)))


if __name__ == "__main__":
    sys.exit(main())
