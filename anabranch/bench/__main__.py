"""python -m anabranch.bench BENCH: the benchmarks with nothing installed but torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from anabranch.bench.cases import BENCHES
from anabranch.bench.runner import Options, run
from anabranch.bench.table import make_table, print_table


def run_and_print(options: Options) -> int:
    """Run a benchmark and print its table; 1 if an implementation of ours was wrong or failed."""
    results = run(options)
    print_table(make_table(results))
    if options.out:
        print(f"written to {options.out}")
    broken = [row for row in results.rows if row.role == "ours" and row.status in BROKEN]
    return 1 if broken else 0


BROKEN = ("wrong", "failed")


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m anabranch.bench", description=__doc__)
    parser.add_argument("bench", choices=BENCHES)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--filter", default="", help="cases whose name, model or group has this")
    parser.add_argument("--impl", action="append", default=[], help="implementations, by name")
    parser.add_argument("--device", default="", help="cuda or cpu; the GPU if there is one")
    parser.add_argument("--quick", action="store_true", help="three cases")
    given = parser.parse_args(arguments)
    options = Options(
        bench=given.bench,
        device=given.device,
        pattern=given.filter,
        impls=tuple(given.impl),
        quick=given.quick,
        out=given.out,
    )
    try:
        return run_and_print(options)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
