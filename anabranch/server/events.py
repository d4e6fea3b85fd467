"""Server-sent events of a stream, and a shortcut for those that bring nothing but text."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable

from pydantic import BaseModel

DONE = b"data: [DONE]\n\n"
_quoted = json.JSONEncoder(ensure_ascii=False).encode


def as_json(model: BaseModel) -> bytes:
    """The fields that were given."""
    return model.model_dump_json(exclude_unset=True).encode()


def event_of(model: BaseModel) -> bytes:
    """One event."""
    return b"data: " + as_json(model) + b"\n\n"


class TextEvents:
    """Events of choices that differ in their text alone: what stands around it is written once.

    `chunk` makes the model of a choice, by its index, with a text. Writing the model each time
    takes six times as long, and there is one for every token.
    """

    def __init__(self, chunk: Callable[[int, str], BaseModel]) -> None:
        self._chunk = chunk
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def event(self, index: int, text: str) -> bytes:
        """A choice's next text."""
        around = self._around.get(index)
        if around is None:
            around = self._around[index] = self._cut(index)
        return around[0] + _quoted(text).encode() + around[1]

    def _cut(self, index: int) -> tuple[bytes, bytes]:
        mark = secrets.token_hex(16)  # occurs nowhere else
        before, _, after = event_of(self._chunk(index, mark)).partition(_quoted(mark).encode())
        return before, after
