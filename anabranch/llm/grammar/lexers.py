"""Lexers of a grammar: each knows the states of texts, and one thread at a time can use it.

Copies of a matcher share its lexer. Another matcher has its own, and learns the states anew, which
costs less than waiting. By the times of single masks, 64 sequences of an array of records on 12
threads take 1.8 ms a step with 16 lexers (99th percentile 6.5) and 1.1 with 64 (3.3).
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

# Of a core, for a lexer. What takes longer takes memory too, up to 200 MB: its grammar has one.
MAX_REPEATED_SECONDS = 0.03


class Lexer:
    """That of a matcher at the beginning of its grammar."""

    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher
        self.num_users = 0
        self.failed = False  # it met a bound of its own: each of its copies will


class Made(NamedTuple):
    """A matcher, and the seconds of a core that it took, and that its first mask takes again."""

    matcher: Any
    seconds: float
    mask_seconds: float = 0.0


class LexerUse:
    """By a sequence, from before it begins until it is forgotten."""

    def __init__(self, lexer: Lexer) -> None:
        self.lexer = lexer


class Lexers:
    """Of one grammar, for sequences that come and go. May be used from any thread.

    `make` is told whether to give way to steps meanwhile.
    """

    def __init__(self, make: Callable[[bool], Made], most: int) -> None:
        self._make, self._most = make, most
        self._slow = False  # to make: there is one then, and none is made in a step
        self._lexers: list[Lexer] = []
        self._left = deque[Lexer]()  # by those that used them
        self._making, self._lock = threading.Lock(), threading.Lock()

    def __len__(self) -> int:
        return len(self._lexers)

    def reserve(self, num_seqs: int, *, aside: bool = False) -> list[LexerUse]:
        """For sequences that will begin; lexers that are missing are made here, not in a step."""
        with self._making:
            while self._misses_one(num_seqs):
                self._add(aside)
            return [self.use() for _ in range(num_seqs)]

    def use(self) -> LexerUse:
        """The lexer that fewest use; where all have failed, a new one if it is made quickly."""
        if not self._slow and all(each.failed for each in self._lexers):
            self._add(aside=False)
        with self._lock:
            self._count_left()
            lexer = min(self._lexers, key=lambda each: (each.failed, each.num_users))
            lexer.num_users += 1
        use = LexerUse(lexer)
        # It may be forgotten anywhere, by the thread that has the lock too: take no lock then.
        weakref.finalize(use, self._left.append, lexer).atexit = False
        return use

    def _add(self, aside: bool) -> None:
        made = self._make(aside)
        if made.seconds > MAX_REPEATED_SECONDS:
            self._slow, self._most = True, 1
        with self._lock:
            alive = [each for each in self._lexers if not each.failed]
            self._lexers = [*alive, Lexer(made.matcher)]

    def _misses_one(self, num_seqs: int) -> bool:
        with self._lock:
            self._count_left()
            alive = [each.num_users for each in self._lexers if not each.failed]
            return len(alive) < min(self._most, sum(alive) + num_seqs)

    def _count_left(self) -> None:
        while self._left:
            self._left.popleft().num_users -= 1
