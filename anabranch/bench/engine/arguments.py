"""Options dataclasses on the command line where typer is not installed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from anabranch.bench.engine.errors import EXPECTED, one_line
from anabranch.bench.engine.fields import options_of


def add_options(parser: argparse.ArgumentParser, kind: type) -> None:
    """An argument for each option of a dataclass."""
    for option in options_of(kind):
        shown: dict[str, Any] = {"default": option.default, "help": option.help.replace("%", "%%")}
        if option.type is bool:
            shown["action"] = argparse.BooleanOptionalAction
        else:
            shown |= {"type": option.type, "metavar": option.metavar}
        parser.add_argument(option.flag, **shown)


def exit_code(run: Callable[[], object]) -> int:
    """0, or 2 behind a line that says what the user can mend."""
    try:
        run()
    except EXPECTED as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    return 0
