"""Answers of gpt-oss: messages on channels of reasoning, of calls and of text."""

from __future__ import annotations

import re

from anabranch.llm.server.answer_pieces import AnswerPiece, PieceKind
from anabranch.llm.server.marked_text import MarkedText

_HEADER_END = "<|message|>"
_HEADER_BEGINS = ("<|channel|>", "<|start|>")
_BODY_ENDS = ("<|end|>", "<|return|>", "<|call|>", *_HEADER_BEGINS)
_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")


class ChannelParser:
    """A header names a channel and whom a message is for; its text follows."""

    def __init__(self) -> None:
        self._text = MarkedText()
        self._header: str | None = None  # while one arrives
        self._kind = PieceKind.TEXT

    def push(self, text: str, *, final: bool) -> list[AnswerPiece]:
        """What is new."""
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
