"""Progress of loading, capturing and running: a bar where rich is installed, lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib.util import find_spec

Progress = Callable[[str, int, int], None]  # what, done, of; 0 if nobody knows


@contextmanager
def progress_bars() -> Generator[Progress]:
    """On standard error, one for whatever is under way; gone when it is over."""
    if find_spec("rich") is None:
        yield _lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[count]}"),
        TimeElapsedColumn(),
    )
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task: TaskID | None = None
        current = ""

        def advance(what: str, done: int, of: int) -> None:
            nonlocal task, current
            if task is not None and what != current:
                bars.remove_task(task)
                task = None
            count = f"{done}/{of}" if of else ""
            if task is None:
                task, current = bars.add_task(what, total=of or None, count=count), what
            bars.update(task, completed=done, total=of or None, count=count)

        yield advance


def _lines() -> Progress:
    """A line when something begins, and at every quarter of it."""
    last: tuple[str, int] = ("", 0)

    def advance(what: str, done: int, of: int) -> None:
        nonlocal last
        reached = (what, 4 * done // of if of else 0)
        if reached != last:
            count = f" {done}/{of}" if of else ""
            print(f"{what}{count}", file=sys.stderr, flush=True)
        last = reached

    return advance
