"""A thread that writes large answers, so that the event loop answers others meanwhile.

One: each thread that runs Python takes its share of the interpreter from the event loop. Its
priority is that of the event loop, which would wait for one that holds the interpreter's lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

LARGE_ANSWER = 1000  # tokens, logprobs or strings: written in a millisecond
T = TypeVar("T")


class WritingThread:
    """Runs calls that write, of the event loop's thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "write-answers")

    async def run(self, num_items: int, call: Callable[[], T]) -> T:
        """The result of a call that writes `num_items`: at once if they are few."""
        if num_items <= LARGE_ANSWER:
            return call()
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)
