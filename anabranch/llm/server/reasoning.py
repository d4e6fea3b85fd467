"""Reasoning of a model, apart from its answer."""

from __future__ import annotations

from typing import Any

from anabranch.llm.server.answer_pieces import AnswerPiece, PieceKind, PieceParser
from anabranch.llm.server.marked_text import MarkedText

BEGIN, END = "<think>", "</think>"


def thinks(tokenizer: Any | None) -> bool:
    """Whether a model was trained to reason between these marks."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    return tokenizer is not None and (BEGIN in template or BEGIN in tokenizer.get_vocab())


class ReasoningParser:
    """Text up to the end of reasoning is reasoning, if it begins so; `rest` cuts what follows."""

    def __init__(self, rest: PieceParser | None, *, opened: bool) -> None:
        self._rest = rest
        self._text = MarkedText()
        self._state = "reasoning" if opened else "start"
        self._begun = False  # whether reasoning has a text yet

    def push(self, text: str, *, final: bool) -> list[AnswerPiece]:
        """What is new."""
        self._text.push(text)
        pieces: list[AnswerPiece] = []
        if self._state == "start":
            self._start(final)
        if self._state == "reasoning":
            if not self._begun:
                self._text.held = self._text.held.lstrip("\n")
                self._begun = bool(self._text.held)
            said, mark = self._text.take([END], final=final)
            pieces.append(AnswerPiece(PieceKind.REASONING, said))
            if mark is not None:
                self._state, self._text.held = "after", self._text.held.lstrip()
        if self._state == "after" and self._text.held.lstrip():
            self._state, self._text.held = "answer", self._text.held.lstrip()
        if self._state == "answer" or (final and self._state != "reasoning"):
            rest, self._text.held = self._text.held, ""
            if self._rest is None:
                pieces.append(AnswerPiece(PieceKind.TEXT, rest))
            else:
                pieces += self._rest.push(rest, final=final)
        return pieces

    def _start(self, final: bool) -> None:
        begun = self._text.held.lstrip()
        if begun.startswith(BEGIN):
            self._text.held = begun.removeprefix(BEGIN)
            self._state = "reasoning"
        elif begun and (final or not BEGIN.startswith(begun)):
            self._state = "answer"
