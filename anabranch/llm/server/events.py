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
    """Events of choices that differ in their text alone: the rest is written once.

    Writing the model of every chunk takes six times as long, and there is one for every token.
    """

    def __init__(self) -> None:
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def event(self, index: int, text: str, chunk: Callable[[int, str], BaseModel]) -> bytes:
        """A choice's next text; `chunk` makes the model of a choice, by its index, with a text."""
        around = self._around.get(index)
        if around is None:
            mark = secrets.token_hex(16)  # occurs nowhere else
            event = event_of(chunk(index, mark))
            before, _, after = event.partition(_quoted(mark).encode())
            around = self._around[index] = before, after
        return around[0] + _quoted(text).encode() + around[1]
