"""Masks of many grammars at once, on the library's own threads and without Python's lock.

States with the same lexer wait for each other, so they stand side by side: a thread that begins
with one goes on with the next.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from anabranch.llm.grammar.grammar_state import GrammarState, Words

MAX_THREADS = 16
SLOW_SECONDS = 0.02  # of a thread's mask on average, after which some steps are made one by one
ALONE_STEPS = 8
States = Sequence[tuple[GrammarState, int]]


class MaskThreads:
    """Fills masks of a step."""

    def __init__(self, num_threads: int | None = None, *, pinned: bool = False) -> None:
        self.pinned = pinned  # for a copy to a GPU
        self._num_threads = num_threads or min(MAX_THREADS, len(os.sched_getaffinity(0)) * 3 // 4)
        self._executor: Any = None  # made for the first step that needs it
        self._alone = 0  # steps to come in which every mask is made and timed by itself

    def fill(self, states: States, words: Words) -> bool:
        """Write the mask of each state into its row of `words`; False if none was written."""
        if self._num_threads < 2 or len({state.lexer for state, _ in states}) < 2:
            return False
        if self._alone:
            self._alone -= 1
            return False
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(num_threads=self._num_threads)
        began = time.perf_counter()
        in_order = sorted(states, key=lambda pair: pair[0].lexer)
        matchers = [(state.matcher, row) for state, row in in_order]
        num_rows, num_words = words.shape
        self._executor.unsafe_compute_mask_ptr(
            matchers, words.ctypes.data, num_words * words.itemsize, num_rows
        )
        most = -(-len(states) // self._num_threads)
        if time.perf_counter() - began > SLOW_SECONDS * most:  # to find out who is slow
            self._alone = ALONE_STEPS
        return True
