"""Kernels compiled side by side, before they are needed."""

from __future__ import annotations

import os
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar

THREADS = 16  # a compilation waits for ptxas, a process of its own, most of its time

AHEAD: ContextVar[bool] = ContextVar("AHEAD", default=False)  # kernels are compiled and not run


@contextmanager
def compiling_ahead() -> Generator[None]:
    """Compile the Triton and Gluon kernels that are launched inside, and run none of them.

    The compilations run in threads; all have ended when the block is left. What the kernels would
    have written is left as it was. A kernel that does not compile raises where it is first needed.
    """
    from triton.runtime._async_compile import (  # pyright: ignore[reportMissingTypeStubs]
        AsyncCompileMode,
    )

    token = AHEAD.set(True)
    try:
        with (
            ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool,
            AsyncCompileMode(pool, ignore_errors=True),  # an error would leave the mode active
        ):
            yield
    finally:
        AHEAD.reset(token)
