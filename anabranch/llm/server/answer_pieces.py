"""Pieces of an answer (reasoning, text, calls), and parsers that find them in streamed text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol

BEGIN, END = "<think>", "</think>"
_HEADER_END = "<|message|>"
_HEADER_BEGINS = ("<|channel|>", "<|start|>")
_BODY_ENDS = ("<|end|>", "<|return|>", "<|call|>", *_HEADER_BEGINS)
_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")


class PieceKind(Enum):
    """What a piece of an answer is."""

    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"  # the name of a function, whose arguments follow
    ARGUMENTS = "arguments"


class AnswerPiece(NamedTuple):
    """New text of an answer."""

    kind: PieceKind
    text: str


class PieceParser(Protocol):
    """Splits streamed text into pieces of an answer."""

    def push(self, text: str, *, final: bool) -> list[AnswerPiece]:
        """The pieces that this text completes."""
        ...


def joined(pieces: list[AnswerPiece]) -> list[AnswerPiece]:
    """Merge neighbouring pieces of one kind; each call starts a new piece."""
    found: list[AnswerPiece] = []
    for kind, text in pieces:
        if found and found[-1].kind is kind and kind is not PieceKind.CALL:
            found[-1] = AnswerPiece(kind, found[-1].text + text)
        elif text:
            found.append(AnswerPiece(kind, text))
    return found


class MarkedText:
    """Holds back what may turn out to be the beginning of a mark."""

    def __init__(self) -> None:
        self.held = ""

    def push(self, text: str) -> None:
        self.held += text

    def take(self, marks: Sequence[str], *, final: bool = False) -> tuple[str, str | None]:
        """The text before the first mark, which is consumed; without one, what cannot begin one."""
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


def thinks(tokenizer: Any | None) -> bool:
    """Whether a model was trained to reason between BEGIN and END."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    return tokenizer is not None and (BEGIN in template or BEGIN in tokenizer.get_vocab())


class ReasoningParser:
    """Splits reasoning, if the answer begins with it, from the text, which `rest` parses."""

    def __init__(self, rest: PieceParser | None, *, opened: bool) -> None:
        self._rest = rest
        self._text = MarkedText()
        self._state = "reasoning" if opened else "start"
        self._begun = False  # whether reasoning has a text yet

    def push(self, text: str, *, final: bool) -> list[AnswerPiece]:
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


class ChannelParser:
    """gpt-oss: a message has a header, with its channel and recipient, and then its text."""

    def __init__(self) -> None:
        self._text = MarkedText()
        self._header: str | None = None  # while one arrives
        self._kind = PieceKind.TEXT

    def push(self, text: str, *, final: bool) -> list[AnswerPiece]:
        self._text.push(text)
        pieces: list[AnswerPiece] = []
        more = True
        while more:
            more = self._read_header(pieces) if self._header is not None else False
            if self._header is None:
                before, mark = self._text.take(_BODY_ENDS, final=final)
                pieces.append(AnswerPiece(self._kind, before))
                if mark is None:
                    return pieces
                self._header, more = "", True
        return pieces

    def _read_header(self, pieces: list[AnswerPiece]) -> bool:
        said, mark = self._text.take([_HEADER_END])
        self._header = (self._header or "") + said
        if mark is None:
            return False
        call = _RECIPIENT.search(self._header)
        if call is not None:
            self._kind = PieceKind.ARGUMENTS
            pieces.append(AnswerPiece(PieceKind.CALL, call[1]))
        else:
            self._kind = PieceKind.REASONING if "analysis" in self._header else PieceKind.TEXT
        self._header = None
        return True
