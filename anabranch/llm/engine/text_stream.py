"""The text of tokens as they arrive, ended by stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anabranch.llm.engine.detokeniser import Detokeniser, token_decoder


class TextStream:
    """The text of one continuation.

    Text may lag behind tokens: some of it depends on the tokens that follow. Text that may turn
    out to be the beginning of a stop string is held back from `stable_text` as well.
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
        self._pieces: Detokeniser | None = None
        if tokenizer is not None:
            self._pieces = Detokeniser(token_decoder(tokenizer, skip_special), prompt)
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._longest = max(map(len, self._stop), default=0)
        self._floor = 0  # characters in which no stop string counts
        self._whole: str | None = None  # up to a stop string
        self.stopped_by: str | None = None

    def push(self, token: int, *, may_stop: bool = True) -> bool:
        """Add a token; whether it completes a stop string, with or before which the text ends."""
        if self._pieces is None:
            return False
        known = max(len(self._pieces.text), self._floor)
        self._pieces.push(token)
        if not self._stop:
            return False
        text = self.text
        if not may_stop:
            self._floor = len(text)
            return False
        starts = [max(known - len(stop) + 1, 0) for stop in self._stop]
        found = [
            (text.find(stop, start), stop) for stop, start in zip(self._stop, starts, strict=True)
        ]
        found = [(place, stop) for place, stop in found if place >= 0]
        if not found:
            return False
        place, self.stopped_by = min(found)
        self._whole = text[: place + (len(self.stopped_by) if self._include_stop else 0)]
        return True

    @property
    def text(self) -> str:
        """All of it, as if no token followed."""
        if self._whole is not None:
            return self._whole
        return self._pieces.text + self._pieces.pending if self._pieces else ""

    @property
    def stable_text(self) -> str:
        """The text that no later token can take back."""
        if self._whole is not None or self._pieces is None:
            return self.text
        text = self._pieces.text
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stop):
                return text[:-size]
        return text
