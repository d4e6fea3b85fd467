"""Where a JSON value ends, in text that arrives in pieces."""

from __future__ import annotations


class JsonValueEnd:
    """Counts brackets outside strings. Values are objects, arrays or strings; others end at once.

    `push` says how much of a piece belongs to the value, and `done` whether it is complete.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False
        self.done = False

    def push(self, text: str) -> int:
        """Characters up to the end of the value; all of them if it goes on."""
        for place, mark in enumerate(text):
            self._take(mark)
            if self.done:
                return place + 1
        return len(text)

    def _take(self, mark: str) -> None:
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif mark == "\\":
                self._escaped = True
            elif mark == '"':
                self._in_string = False
                self.done = not self._depth
        elif mark == '"':
            self._in_string = True
        elif mark in "{[":
            self._depth += 1
        elif mark in "}]":
            self._depth -= 1
            self.done = self._depth <= 0
