"""Masks of many grammars at once, on several threads.

Of llguidance's calls only those of an executor give up Python's lock. States with the same lexer
wait for each other, so each thread has some lexers for itself, and an executor of one thread.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from anabranch.llm.grammar.grammar_state import GrammarState, Words

MAX_THREADS = 16
SLOW_SECONDS = 0.02  # of a thread's mask on average, after which some steps are made one by one
ALONE_STEPS = 8
States = Sequence[tuple[GrammarState, int]]


class MaskThreads:
    """Fills masks of a step."""

    def __init__(self, num_threads: int | None = None) -> None:
        self._num_threads = num_threads or min(MAX_THREADS, len(os.sched_getaffinity(0)))
        self._pool: ThreadPoolExecutor | None = None  # made for the first step that needs it
        self._executors: list[Any] = []
        self._alone = 0  # steps to come in which every mask is made and timed by itself

    def fill(self, states: States, words: Words) -> bool:
        """Write the mask of each state into its row of `words`; False if none was written."""
        if self._num_threads < 2 or len({state.lexer for state, _ in states}) < 2:
            return False
        if self._alone:
            self._alone -= 1
            return False
        shares = share_out(states, self._num_threads)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._num_threads, "masks")
        self._add_executors(len(shares))
        began = time.perf_counter()
        jobs = [
            self._pool.submit(self._fill_share, place, share, words)
            for place, share in enumerate(shares)
        ]
        wait(jobs)  # all of them: none may write when another has failed and masks are made again
        for job in jobs:
            job.result()
        most = max(map(len, shares))
        if time.perf_counter() - began > SLOW_SECONDS * most:  # to find out who is slow
            self._alone = ALONE_STEPS
        return True

    def _fill_share(self, place: int, share: States, words: Words) -> None:
        matchers = [(state.matcher, row) for state, row in share]
        num_rows, num_words = words.shape
        self._executors[place].unsafe_compute_mask_ptr(
            matchers, words.ctypes.data, num_words * words.itemsize, num_rows
        )

    def _add_executors(self, count: int) -> None:
        from llguidance import LLExecutor

        while len(self._executors) < count:
            self._executors.append(LLExecutor(num_threads=1))


def share_out(states: States, num_shares: int) -> list[list[tuple[GrammarState, int]]]:
    """States for so many threads at most; those with the same lexer stay together."""
    groups: dict[int, list[tuple[GrammarState, int]]] = {}
    for state, row in states:
        groups.setdefault(state.lexer, []).append((state, row))
    shares: list[list[tuple[GrammarState, int]]] = [[] for _ in range(num_shares)]
    for group in sorted(groups.values(), key=len, reverse=True):
        min(shares, key=len).extend(group)
    return [share for share in shares if share]
