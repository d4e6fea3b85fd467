"""Masks of many grammars at once, on several threads.

Of llguidance's calls only those of an executor give up Python's lock. States with the same lexer
wait for each other, so each thread has some lexers for itself, and an executor of one thread.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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

    def can_start(self, states: Sequence[GrammarState]) -> bool:
        """Whether masks of these are made by threads."""
        several = self._num_threads > 1 and len({state.lexer for state in states}) > 1
        return several and not self._alone

    def start(self, states: States, words: Words) -> MasksUnderWay | None:
        """Begin to write the mask of each state into its row of `words`; None: nothing is begun."""
        if not self.can_start([state for state, _ in states]):
            self._alone = max(self._alone - 1, 0)
            return None
        shares = share_out(states, self._num_threads)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._num_threads, "masks")
        self._add_executors(len(shares))
        jobs = [
            self._pool.submit(fill_share, executor, share, words)
            for executor, share in zip(self._executors, shares, strict=False)
        ]
        return MasksUnderWay(self, jobs)

    def make_alone(self) -> None:
        """After some that were slow, to find out which."""
        self._alone = ALONE_STEPS

    def _add_executors(self, count: int) -> None:
        from llguidance import LLExecutor

        while len(self._executors) < count:
            self._executors.append(LLExecutor(num_threads=1))


class MasksUnderWay:
    """Masks that threads are writing."""

    def __init__(self, threads: MaskThreads, jobs: list[Future[float]]) -> None:
        self._threads, self._jobs = threads, jobs

    def wait(self) -> None:
        """Until all are written; raises what failed."""
        if max(job.result() for job in self._jobs) > SLOW_SECONDS:
            self._threads.make_alone()


def fill_share(executor: Any, share: States, words: Words) -> float:
    """Write some masks; seconds each."""
    began = time.perf_counter()
    num_rows, num_words = words.shape
    executor.unsafe_compute_mask_ptr(
        [(state.matcher, row) for state, row in share],
        words.ctypes.data,
        num_words * words.itemsize,
        num_rows,
    )
    return (time.perf_counter() - began) / len(share)


def share_out(states: States, num_shares: int) -> list[list[tuple[GrammarState, int]]]:
    """States for so many threads at most; those with the same lexer stay together."""
    groups: dict[int, list[tuple[GrammarState, int]]] = {}
    for state, row in states:
        groups.setdefault(state.lexer, []).append((state, row))
    shares: list[list[tuple[GrammarState, int]]] = [[] for _ in range(num_shares)]
    for group in sorted(groups.values(), key=len, reverse=True):
        min(shares, key=len).extend(group)
    return [share for share in shares if share]
