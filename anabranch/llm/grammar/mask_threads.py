"""Masks of many grammars at once, on the library's own threads and without Python's lock.

A thread of Python's waits for them, so that whoever began them can do something else. States with
the same lexer wait for each other, so they stand side by side: a thread that begins with one goes
on with the next.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import Any

from anabranch.llm.grammar.grammar_state import GrammarState, Words

MAX_THREADS = 16
SLOW_SECONDS = 0.02  # of a thread's mask on average, after which some steps are made one by one
ALONE_STEPS = 8
States = Sequence[tuple[GrammarState, int]]


def num_mask_threads() -> int:
    """Threads that make masks; below 2 masks are made one by one, where they are asked for."""
    return min(MAX_THREADS, len(os.sched_getaffinity(0)) * 3 // 4)


class MaskThreads:
    """Fills masks of a step."""

    def __init__(self, num_threads: int | None = None, *, pinned: bool = False) -> None:
        self.pinned = pinned  # for a copy to a GPU
        self._num_threads = num_threads or num_mask_threads()
        self._executor: Any = None  # made for the first step that needs it
        self._waiter: ThreadPoolExecutor | None = None
        self._alone = 0  # steps to come in which every mask is made and timed by itself

    def start(self, states: States, words: Words) -> Future[None] | None:
        """Begin to write the mask of each state into its row of `words`; None: nothing is begun.

        Until the result is there, nobody else may ask these states for anything.
        """
        if self._num_threads < 2 or len({state.lexer for state, _ in states}) < 2:
            return None
        if self._alone:
            self._alone -= 1
            return None
        if self._executor is None or self._waiter is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(num_threads=self._num_threads)
            self._waiter = ThreadPoolExecutor(1, "masks")
        in_order = sorted(states, key=lambda pair: id(pair[0].lexer))
        matchers = [(state.matcher, row) for state, row in in_order]
        begun = Event()
        under_way = self._waiter.submit(self._fill, matchers, words, begun)
        begun.wait()  # gives that thread Python's lock, which else it would get milliseconds later
        return under_way

    def _fill(self, matchers: list[tuple[Any, int]], words: Words, begun: Event) -> None:
        num_rows, num_words = words.shape
        address, size = words.ctypes.data, num_words * words.itemsize
        began = time.perf_counter()
        begun.set()
        self._executor.unsafe_compute_mask_ptr(matchers, address, size, num_rows)
        most = -(-len(matchers) // self._num_threads)
        if time.perf_counter() - began > SLOW_SECONDS * most:  # to find out who is slow
            self._alone = ALONE_STEPS
