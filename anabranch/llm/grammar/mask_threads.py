"""Threads that make the masks of a step: the library of grammars works without Python's lock."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

MAX_THREADS = 8
MIN_ITEMS = 4  # for each thread; waking one costs as much as a mask or two


class MaskThreads:
    """Runs many small pieces of work; the caller takes part in them."""

    def __init__(self, num_threads: int | None = None) -> None:
        self._num_threads = num_threads or min(MAX_THREADS, len(os.sched_getaffinity(0)))
        self._pool: ThreadPoolExecutor | None = None  # made for the first step that needs it

    def run(self, work: Callable[[int], None], items: Sequence[int]) -> None:
        """Call `work` with every item once, in any order; the first error is raised at the end."""
        waiting = deque(items)

        def take() -> None:
            while waiting:
                try:
                    item = waiting.popleft()
                except IndexError:  # another thread took the last
                    return
                work(item)

        helpers = min(self._num_threads, len(items) // MIN_ITEMS) - 1
        begun = [self._helpers().submit(take) for _ in range(helpers)]
        try:
            take()
        finally:
            waiting.clear()
            errors = [each.exception() for each in begun]
        if error := next(filter(None, errors), None):
            raise error

    def _helpers(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._num_threads - 1, "masks")
        return self._pool
