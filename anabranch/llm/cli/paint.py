"""Text as it comes, each token in the colour of its origin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from anabranch.llm.engine.outputs import CompletionOutput
from anabranch.llm.engine.text_stream import TextStream
from anabranch.llm.sequences.sequence import Origin

STYLES = {Origin.SAMPLED: None, Origin.ACCEPTED: "green", Origin.CORRECTED: "yellow"}
LEGEND = "plain: sampled, [green]green: drafted and accepted[/], [yellow]yellow: corrected[/]"


class Painter:
    """Writes a continuation to a console, as far as it is certain."""

    def __init__(
        self, console: Console, tokenizer: Any, prompt: Sequence[int], skip_special: bool = True
    ) -> None:
        self._console = console
        self._tokenizer = tokenizer
        self._stream = TextStream(tokenizer, prompt=prompt, skip_special=skip_special)
        self._styles: list[str | None] = []  # of each character of the stream
        self._num_tokens = 0
        self._num_shown = 0

    def show(self, output: CompletionOutput) -> None:
        """Write what is new in it."""
        start = self._num_tokens
        new = zip(output.token_ids[start:], output.origins[start:], strict=True)
        for token, origin in new:
            self._num_tokens += 1
            style = STYLES[Origin(origin)]
            if self._tokenizer is None:
                self._write(f"{token} ", style)
                continue
            self._stream.push(token)
            missing = len(self._stream.text) - len(self._styles)
            self._styles += [style] * missing
        self._show_text(output.text)

    def _show_text(self, text: str) -> None:
        """The text may be shorter than the tokens': what could be a stop string is held back."""
        start = self._num_shown
        while start < len(text):
            style = self._style(start)
            stop = start + 1
            while stop < len(text) and self._style(stop) == style:
                stop += 1
            self._write(text[start:stop], style)
            start = stop
        self._num_shown = max(start, self._num_shown)

    def _style(self, place: int) -> str | None:
        return self._styles[place] if place < len(self._styles) else None

    def _write(self, text: str, style: str | None) -> None:
        self._console.out(text, style=style, end="", highlight=False)
        self._console.file.flush()
