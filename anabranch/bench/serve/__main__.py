"""python -m anabranch.bench.serve: the load generator without typer and rich."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from anabranch.bench.engine.errors import EXPECTED, one_line
from anabranch.bench.engine.fields import options_of
from anabranch.bench.serve.command import HELP, run_and_show
from anabranch.bench.serve.options import ServeOptions


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        prog="python -m anabranch.bench.serve",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for option in options_of(ServeOptions):
        shown: dict[str, Any] = {"default": option.default, "help": option.help.replace("%", "%%")}
        if option.type is bool:
            parser.add_argument(option.flag, action=argparse.BooleanOptionalAction, **shown)
        else:
            parser.add_argument(option.flag, type=option.type, metavar=option.metavar, **shown)
    try:
        run_and_show(ServeOptions(**vars(parser.parse_args(arguments))))
    except EXPECTED as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
