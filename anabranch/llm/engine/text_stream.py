"""The text of tokens as they arrive, ended by stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anabranch.llm.engine.detokeniser import Detokeniser, token_decoder
from anabranch.llm.engine.stop_strings import START, StopStrings

NO_STOPS = StopStrings()


class TextStream:
    """The text of one continuation.

    Text may lag behind tokens: some of it depends on the tokens that follow. Text that may turn
    out to be the beginning of a stop string is held back from `stable_text` as well. Of several
    stop strings the first to be complete ends the text, and the longest of those.
    """

    def __init__(
        self,
        tokenizer: Any | None,  # a fast tokenizer of transformers
        *,
        prompt: Sequence[int] = (),
        stop: StopStrings = NO_STOPS,
        include_stop: bool = False,
        skip_special: bool = True,
    ) -> None:
        self._pieces: Detokeniser | None = None
        if tokenizer is not None:
            self._pieces = Detokeniser(token_decoder(tokenizer, skip_special), prompt)
        self._stop = stop
        self._state, self._num_read = START, 0  # of the stop strings, after this much final text
        self._include_stop = include_stop
        self._floor = 0  # characters in which no stop string counts
        self._whole: str | None = None  # up to a stop string
        self.stopped_by: str | None = None

    def push(self, token: int, *, may_stop: bool = True) -> bool:
        """Add a token; whether it completes a stop string, with or before which the text ends."""
        if self._pieces is None:
            return False
        self._pieces.push(token)
        if not self._stop:
            return False
        if not may_stop:
            self._floor = len(self.text)
        final = self._pieces.text
        end, self._state = self._read(final, self._num_read, self._state)
        self._num_read = len(final)
        if end is None and (pending := self._pieces.pending):
            end, _ = self._read(final + pending, len(final), self._state)
        if end is None:
            return False
        place, stop = end
        text = self.text
        begin = place - stop
        self.stopped_by = text[begin:place]
        self._whole = text[: place if self._include_stop else begin]
        return True

    def _read(self, text: str, start: int, state: int) -> tuple[tuple[int, int] | None, int]:
        """Where the first stop string ends and its length, if one does; the state at the end."""
        stop = self._stop
        for place in range(start, len(text)):
            state = stop.step(state, text[place])
            if (length := stop.found(state)) and place >= self._floor:
                return (place + 1, length), state
        return None, state

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
        return text[: len(text) - self._stop.held(self._state)]
