"""Tokens become text as they come, and stop strings end it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream


class TextStream:
    """The text of one continuation.

    A token may hold half a character, so text may lag behind tokens. Text that may turn out to be
    the beginning of a stop string is held back from `shown`.
    """

    def __init__(
        self,
        tokenizer: Any | None,  # a fast tokenizer of transformers
        *,
        prompt: Sequence[int] = (),
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
    ) -> None:
        self._tokenizer = None if tokenizer is None else tokenizer.backend_tokenizer
        tail = list(prompt[-PROMPT_TAIL:])
        if self._tokenizer is not None and self._tokenizer.decode(tail).endswith(HALF_CHARACTER):
            tail = []  # a stream that begins inside a character would repeat what is before it
        self._stream = DecodeStream(tail, skip_special_tokens=skip_special)
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._longest = max(map(len, self._stop), default=0)
        self.text = ""
        self.stopped_by: str | None = None

    def push(self, token: int, *, may_stop: bool = True) -> bool:
        """Add a token; whether it completes a stop string, with or before which the text ends."""
        if self._tokenizer is None:
            return False
        piece = self._stream.step(self._tokenizer, token)
        if not piece:
            return False
        known = len(self.text)
        self.text += piece
        if not may_stop:
            return False
        starts = [max(known - len(stop) + 1, 0) for stop in self._stop]
        found = [
            (self.text.find(stop, start), stop)
            for stop, start in zip(self._stop, starts, strict=True)
        ]
        found = [(place, stop) for place, stop in found if place >= 0]
        if not found:
            return False
        place, self.stopped_by = min(found)
        self.text = self.text[: place + (len(self.stopped_by) if self._include_stop else 0)]
        return True

    @property
    def shown(self) -> str:
        """The text that no later token can take back."""
        if self.stopped_by is not None:
            return self.text
        for size in range(min(self._longest - 1, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-size:]) for stop in self._stop):
                return self.text[:-size]
        return self.text


HALF_CHARACTER = "\N{REPLACEMENT CHARACTER}"
PROMPT_TAIL = 6  # tokens of the prompt that decide how the first one after them is written
