"""Threads that share one engine: one of them steps it for all, the others wait for their results.

The thread that steps goes on until its own requests are done, then another takes over: a thread
that runs kernels has a team of threads of its own, so they do not change with every step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager


class Turns:
    """Who may use an engine now. A thread may ask again while it steps, as a callback may."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # held during a step, and by whoever is between steps
        self._counting = threading.Lock()
        self._entering = 0  # threads that go before the next step
        self._stepping: int | None = None  # the thread that steps for all
        self._num_steps = 0

    @contextmanager
    def between_steps(self) -> Generator[None]:
        """Have the engine alone, before its next step."""
        with self._counting:
            self._entering += 1
        with self._changed:
            with self._counting:
                self._entering -= 1
            try:
                yield
            finally:
                self._changed.notify_all()

    def run(
        self,
        step: Callable[[], object],
        done: Callable[[], bool],
        advance: Callable[[], object] | None = None,
    ) -> None:
        """Let the engine step until `done`, by this thread or another; `advance` after each step.

        An error of a step is raised in the thread that ran it; the next one tries again.
        """
        me = threading.get_ident()
        is_outer = self._stepping != me
        try:
            while not done():
                self._run_once(step, done, me)
                if advance is not None:
                    advance()
        finally:
            if is_outer:
                self._leave(me)

    def _run_once(self, step: Callable[[], object], done: Callable[[], bool], me: int) -> None:
        """Step, or wait until another thread has."""
        with self._changed:
            seen = self._num_steps
            self._changed.wait_for(lambda: done() or self._num_steps != seen or self._is_free(me))
            if done() or not self._is_free(me):
                return
            self._stepping = me
            step()
            self._num_steps += 1
            self._changed.notify_all()

    def _is_free(self, me: int) -> bool:
        return self._stepping in (None, me) and not self._entering

    def _leave(self, me: int) -> None:
        with self._changed:
            if self._stepping == me:
                self._stepping = None
            self._changed.notify_all()
