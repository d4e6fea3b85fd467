"""python -m anabranch.bench.evaluate: accuracy without typer and rich."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from anabranch.bench.engine.errors import EXPECTED, one_line
from anabranch.bench.engine.fields import options_of
from anabranch.bench.evaluate.options import EvalOptions
from anabranch.bench.evaluate.run import run_eval


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m anabranch.bench.evaluate", description=__doc__)
    for option in options_of(EvalOptions):
        shown: dict[str, Any] = {"default": option.default, "help": option.help.replace("%", "%%")}
        if option.type is bool:
            shown["action"] = argparse.BooleanOptionalAction
        else:
            shown |= {"type": option.type, "metavar": option.metavar}
        parser.add_argument(option.flag, **shown)
    try:
        run_eval(EvalOptions(**vars(parser.parse_args(arguments))))
    except EXPECTED as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
