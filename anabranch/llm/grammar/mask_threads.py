"""Masks of many grammars at once: the library's own threads, which do not need Python's lock.

Of its calls for one grammar none gives the lock up, so threads of Python would take turns.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from anabranch.llm.grammar.grammar_state import GrammarState, Words

MAX_THREADS = 16
MIN_STATES = 2  # fewer are not worth waking threads
SLOW_SECONDS = 0.02  # of a thread's mask on average, after which some steps are made one by one
ALONE_STEPS = 8


class MaskThreads:
    """Fills masks of a step."""

    def __init__(self, num_threads: int | None = None) -> None:
        self._num_threads = num_threads or min(MAX_THREADS, len(os.sched_getaffinity(0)))
        self._executor: Any | None = None  # made for the first step that needs it
        self._alone = 0  # steps to come in which every mask is made and timed by itself

    def fill(self, states: Sequence[tuple[GrammarState, int]], words: Words) -> bool:
        """Write the mask of each state into its row of `words`; False if none was written."""
        if len(states) < MIN_STATES or self._num_threads < 2:
            return False
        if self._alone:
            self._alone -= 1
            return False
        threads = self._threads()
        matchers = [(state.matcher, row) for state, row in states]
        num_rows, num_words = words.shape
        began = time.perf_counter()
        threads.unsafe_compute_mask_ptr(
            matchers, words.ctypes.data, num_words * words.itemsize, num_rows
        )
        rounds = -(-len(states) // self._num_threads)
        if time.perf_counter() - began > SLOW_SECONDS * rounds:  # to find out who is slow
            self._alone = ALONE_STEPS
        return True

    def _threads(self) -> Any:
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(num_threads=self._num_threads)
        return self._executor
