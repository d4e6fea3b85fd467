"""Stop strings, all looked for at once (Aho and Corasick, 1975): a step for each character.

A state is the longest end of the text that begins a stop string. It says both what was found and
how much of the text may still turn out to be the beginning of one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

START = 0  # the state before any text


class StopStrings:
    """An automaton of some strings, none empty; it does not change and may be shared."""

    def __init__(self, strings: Sequence[str] = ()) -> None:
        self._next: list[dict[str, int]] = [{}]  # of each state: the states one character on
        self._shorter = [START]  # the state of the next shorter end of the text
        self._found: list[int] = [0]  # length of the longest string that ends here, or 0
        self._open = [0]  # length of the longest end of the text that something may follow
        for string in strings:
            self._add(string)
        self._link()

    def __bool__(self) -> bool:
        return len(self._next) > 1

    def _add(self, string: str) -> None:
        state = START
        for letter in string:
            following = self._next[state]
            if letter not in following:
                following[letter] = len(self._next)
                self._next.append({})
                self._shorter.append(START)
                self._found.append(0)
                self._open.append(0)
            state = following[letter]
        self._found[state] = len(string)

    def _link(self) -> None:
        """Shorter states are complete before longer ones."""
        waiting = deque((state, 1) for state in self._next[START].values())
        while waiting:
            state, length = waiting.popleft()
            shorter = self._shorter[state]
            self._found[state] = self._found[state] or self._found[shorter]
            self._open[state] = length if self._next[state] else self._open[shorter]
            for letter, longer in self._next[state].items():
                self._shorter[longer] = self.step(shorter, letter)
                waiting.append((longer, length + 1))

    def step(self, state: int, letter: str) -> int:
        """The state after one more character."""
        while (following := self._next[state].get(letter)) is None:
            if state == START:
                return START
            state = self._shorter[state]
        return following

    def found(self, state: int) -> int:
        """Length of the longest string that ends here; 0 if none does."""
        return self._found[state]

    def held(self, state: int) -> int:
        """Characters at the end of the text that may begin a string."""
        return self._open[state]
