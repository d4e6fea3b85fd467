"""python -m anabranch.bench.engine BENCH: the engine's benchmarks without typer and rich."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from anabranch.bench.engine.benches import BENCHES, run_bench
from anabranch.bench.engine.errors import EXPECTED, one_line
from anabranch.bench.engine.fields import Option, options_of


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
        for option in options_of(bench.options):
            _add(command, option)
    given = vars(parser.parse_args(arguments))
    name = given.pop("bench")
    try:
        run_bench(name, BENCHES[name].options(**given))
    except EXPECTED as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    return 0


def _add(parser: argparse.ArgumentParser, option: Option) -> None:
    shown: dict[str, Any] = {"default": option.default, "help": option.help.replace("%", "%%")}
    if option.type is bool:
        parser.add_argument(option.flag, action=argparse.BooleanOptionalAction, **shown)
        return
    parser.add_argument(option.flag, type=option.type, metavar=option.metavar, **shown)


if __name__ == "__main__":
    sys.exit(main())
