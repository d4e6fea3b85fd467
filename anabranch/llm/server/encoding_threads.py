"""Threads that tokenize. Long texts share one of low priority, so that short ones never wait."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from anabranch.llm.server.errors import ApiError

LONG_CHARS = 1 << 16  # tokenized in 35 ms on one core of a server
MAX_WAITING_CHARS = 32 << 20  # of long texts that wait: a bound on memory
NUM_SHORT_THREADS = 2
LOW_PRIORITY = 10  # of nice(1)
T = TypeVar("T")


class EncodingThreads:
    """Runs calls that tokenize, of the event loop's thread."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(NUM_SHORT_THREADS, "encode-short")
        self._long = ThreadPoolExecutor(1, "encode-long", initializer=lower_priority)
        self._waiting_chars = 0

    async def run(self, num_chars: int, call: Callable[[], T]) -> T:
        """The result of a call that tokenizes `num_chars` characters."""
        loop = asyncio.get_running_loop()
        if num_chars <= LONG_CHARS:
            return await loop.run_in_executor(self._short, call)
        if self._waiting_chars and self._waiting_chars + num_chars > MAX_WAITING_CHARS:
            raise ApiError(
                429,
                "too many long prompts wait to be tokenized; try again in 1 s",
                code="queue_full",
                headers={"Retry-After": "1"},
            )
        self._waiting_chars += num_chars
        future = self._long.submit(call)
        # not when the caller leaves: a call that runs cannot be cancelled and holds its text
        future.add_done_callback(lambda _: self._count_down(loop, num_chars))
        return await asyncio.wrap_future(future)

    def _count_down(self, loop: asyncio.AbstractEventLoop, num_chars: int) -> None:
        def count() -> None:
            self._waiting_chars -= num_chars

        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(count)


def lower_priority() -> None:
    """Of the calling thread, so that steps come first."""
    if sys.platform == "linux":  # elsewhere priorities belong to processes
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOW_PRIORITY)
