"""Calls that give way to steps: in threads of low priority, which hold Python's lock for moments.

Whoever waits for the lock waits for the core of the thread that has it, and a thread of low
priority gets none while others want it. On one core with two busy processes beside, a loop of 2 ms
waited up to 103 ms for a thread that compiled at a nice value of 10, and up to 24 at one of 0. So
only calls of a library that releases the lock belong here.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

LOW_PRIORITY = 10  # of nice(1)
T = TypeVar("T")


def lower_priority() -> None:
    """Lower the calling thread's priority for good: only root may raise it again."""
    if sys.platform == "linux":  # elsewhere priorities belong to processes
        thread = threading.get_native_id()
        lower = max(os.getpriority(os.PRIO_PROCESS, thread), LOW_PRIORITY)
        os.setpriority(os.PRIO_PROCESS, thread, lower)


def at_low_priority(call: Callable[[], T]) -> T:
    """The result of a call, made in a thread of its own."""
    made: Future[T] = Future()

    def run() -> None:
        try:
            lower_priority()
            made.set_result(call())
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=run, name="low-priority", daemon=True).start()
    return made.result()
