"""Server-sent events out of bytes that may be cut anywhere."""

from __future__ import annotations

import re

_LINE_END = re.compile(rb"\r\n|\r|\n")


class EventReader:
    """Remembers what of an event has arrived. Only its data is kept."""

    def __init__(self) -> None:
        self._rest = b""  # of a line that has not ended
        self._data: list[bytes] = []
        self._after_return = False  # a line feed that follows belongs to the line before

    def feed(self, piece: bytes) -> list[str]:
        """The data of every event that this piece completes."""
        events: list[str] = []
        for line in self._lines(piece):
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data).decode(errors="replace"))
                self._data = []
        return events

    def _lines(self, piece: bytes) -> list[bytes]:
        if not piece:
            return []
        if self._after_return:
            piece = piece.removeprefix(b"\n")
        *lines, self._rest = _LINE_END.split(self._rest + piece)
        self._after_return = piece.endswith(b"\r")
        return lines
