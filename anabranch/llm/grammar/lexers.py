"""Lexers of a grammar: each knows the states of texts, and one thread at a time can use it.

Copies of a matcher share its lexer. Another matcher has its own, and learns the states anew, which
costs less than waiting. By the times of single masks, 64 sequences of an array of records on 12
threads take 1.8 ms a step with 16 lexers (99th percentile 6.5) and 1.1 with 64 (3.3).
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

# Of a core, for a lexer. What takes longer takes memory too, up to 200 MB: its grammar has one.
MAX_REPEATED_SECONDS = 0.03


class Lexer:
    """That of a matcher at the beginning of its grammar."""

    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher
        self.num_users = 0
        self.failed = False  # it met a bound of its own: each of its copies will


class LexerUse:
    """By a sequence, from before it begins until it is forgotten."""

    def __init__(self, lexer: Lexer) -> None:
        self.lexer = lexer


class Lexers:
    """Of one grammar, for sequences that come and go. May be used from any thread."""

    def __init__(self, make: Callable[[], Any], most: int) -> None:
        self._make, self._most = make, most
        self._lexers: list[Lexer] = []
        self._left = deque[Lexer]()  # by those that used them
        self._making, self._lock = threading.Lock(), threading.Lock()

    def __len__(self) -> int:
        return len(self._lexers)

    def reserve(self, num_seqs: int) -> list[LexerUse]:
        """For sequences that will begin; lexers that are missing are made here, not in a step."""
        with self._making:
            while self._misses_one(num_seqs):
                self._add()
            return [self.use() for _ in range(num_seqs)]

    def use(self) -> LexerUse:
        """The lexer that fewest use; where all have failed, a new one if it is made quickly."""
        if self._most > 1 and all(each.failed for each in self._lexers):
            self._add()
        with self._lock:
            self._count_left()
            lexer = min(self._lexers, key=lambda each: (each.failed, each.num_users))
            lexer.num_users += 1
        use = LexerUse(lexer)
        # It may be forgotten anywhere, by the thread that has the lock too: take no lock then.
        weakref.finalize(use, self._left.append, lexer).atexit = False
        return use

    def _add(self) -> None:
        began = time.thread_time()
        made = Lexer(self._make())
        if time.thread_time() - began > MAX_REPEATED_SECONDS:
            self._most = 1
        with self._lock:
            self._lexers = [each for each in self._lexers if not each.failed] + [made]

    def _misses_one(self, num_seqs: int) -> bool:
        with self._lock:
            self._count_left()
            alive = [each.num_users for each in self._lexers if not each.failed]
            return len(alive) < min(self._most, sum(alive) + num_seqs)

    def _count_left(self) -> None:
        while self._left:
            self._left.popleft().num_users -= 1
