"""Progress of loading, capturing and running, as a bar on standard error."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

Progress = Callable[[str, int, int], None]  # what, how much is done, of how much; 0 if unknown


@contextmanager
def progress_bars() -> Generator[Progress]:
    """One bar for whatever is running; it disappears at the end."""
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


def quiet_transformers() -> None:
    """Switch off the bars and warnings of transformers, which would run into ours.

    It reads these when it is imported, which models that do not need it spare.
    """
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
