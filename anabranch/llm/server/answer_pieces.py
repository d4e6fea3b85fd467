"""What an answer is made of: reasoning, text, and calls of tools."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, Protocol


class PieceKind(Enum):
    """Of a piece."""

    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"  # the name of a function, whose arguments follow
    ARGUMENTS = "arguments"


class AnswerPiece(NamedTuple):
    """Something new of an answer."""

    kind: PieceKind
    text: str


class PieceParser(Protocol):
    """Cuts an answer that arrives in pieces of its own."""

    def push(self, text: str, *, final: bool) -> list[AnswerPiece]:
        """What a piece of text completes."""
        ...


def joined(pieces: list[AnswerPiece]) -> list[AnswerPiece]:
    """Neighbours of one kind as one; a call begins something new."""
    found: list[AnswerPiece] = []
    for kind, text in pieces:
        if found and found[-1].kind is kind and kind is not PieceKind.CALL:
            found[-1] = AnswerPiece(kind, found[-1].text + text)
        elif text:
            found.append(AnswerPiece(kind, text))
    return found
