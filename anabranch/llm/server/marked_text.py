"""Text that arrives in pieces, cut at marks that may lie across them."""

from __future__ import annotations

from collections.abc import Sequence


class MarkedText:
    """Holds back what may turn out to be the beginning of a mark."""

    def __init__(self) -> None:
        self.held = ""

    def push(self, text: str) -> None:
        """Add a piece."""
        self.held += text

    def take(self, marks: Sequence[str], *, final: bool = False) -> tuple[str, str | None]:
        """The text before the first mark, which is taken too; or what surely stands before any."""
        found = [(place, mark) for mark in marks if (place := self.held.find(mark)) >= 0]
        if found:
            place, mark = min(found, key=lambda pair: (pair[0], -len(pair[1])))
            before, self.held = self.held[:place], self.held[place + len(mark) :]
            return before, mark
        keep = 0 if final else self._begun(marks)
        cut = len(self.held) - keep
        before, self.held = self.held[:cut], self.held[cut:]
        return before, None

    def _begun(self, marks: Sequence[str]) -> int:
        """Characters at the end that begin a mark."""
        most = max((len(mark) - 1 for mark in marks), default=0)
        for size in range(min(most, len(self.held)), 0, -1):
            if any(mark.startswith(self.held[-size:]) for mark in marks):
                return size
        return 0
