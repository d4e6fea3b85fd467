"""What a waiting user sees: a bar where rich is installed, a line for each step elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib.util import find_spec

Advance = Callable[[str], None]  # called with what starts now


@contextmanager
def progress(total: int) -> Generator[Advance]:
    """A bar over `total` steps on standard error."""
    if find_spec("rich") is None:
        yield _lines(total)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    columns = (BarColumn(), MofNCompleteColumn(), Remaining(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=total)
        done = -1

        def advance(step: str) -> None:
            nonlocal done
            done += 1
            bar.update(task, completed=done, description=step)

        yield advance


def _lines(total: int) -> Advance:
    steps = iter(range(1, total + 1))

    def advance(step: str) -> None:
        print(f"[{next(steps, total)}/{total}] {step}", file=sys.stderr, flush=True)

    return advance
