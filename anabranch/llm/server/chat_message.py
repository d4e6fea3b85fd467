"""Messages of an answer: text, reasoning and calls, whole or what is new of them."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from anabranch.llm.server.answer_pieces import AnswerPiece, PieceKind, PieceParser, joined
from anabranch.llm.server.chat_models import AssistantMessage
from anabranch.llm.server.tool_models import FunctionCall, ToolCall


def new_call_id() -> str:
    """Nine letters and digits, as Mistral's templates want them."""
    return secrets.token_hex(5)[:9]


class MessageWriter:
    """Writes one answer that is taken apart."""

    def __init__(self, parser: PieceParser, shown: Callable[[str], str]) -> None:
        self._parser, self._shown = parser, shown
        self.num_calls = 0

    def pieces(self, text: str, *, final: bool) -> list[AnswerPiece]:
        """What is new, as it is shown."""
        found = joined(self._parser.push(text, final=final))
        return [
            AnswerPiece(
                kind, self._shown(part) if kind in (PieceKind.TEXT, PieceKind.REASONING) else part
            )
            for kind, part in found
        ]

    def whole(self, text: str) -> AssistantMessage:
        """The message of a whole answer."""
        found: dict[PieceKind, str] = {}
        calls: list[ToolCall] = []
        for kind, part in self.pieces(text, final=True):
            if kind is PieceKind.CALL:
                calls.append(_call(part))
            elif kind is PieceKind.ARGUMENTS:
                calls[-1].function.arguments += part
            else:
                found[kind] = found.get(kind, "") + part
        self.num_calls = len(calls)
        more: dict[str, Any] = {}
        if PieceKind.REASONING in found:
            more["reasoning_content"] = found[PieceKind.REASONING]
        if calls:
            more["tool_calls"] = calls
        content = found.get(PieceKind.TEXT, None if calls else "")
        return AssistantMessage(role="assistant", content=content, **more)

    def deltas(self, text: str, *, final: bool) -> list[dict[str, Any]]:
        """Fields of messages that bring what is new."""
        return [self._delta(piece) for piece in self.pieces(text, final=final)]

    def _delta(self, piece: AnswerPiece) -> dict[str, Any]:
        if piece.kind is PieceKind.TEXT:
            return {"content": piece.text}
        if piece.kind is PieceKind.REASONING:
            return {"reasoning_content": piece.text}
        if piece.kind is PieceKind.CALL:
            self.num_calls += 1
            call = _call(piece.text, index=self.num_calls - 1)
        else:
            function = FunctionCall.model_validate({"arguments": piece.text})
            call = ToolCall(index=self.num_calls - 1, function=function)
        return {"tool_calls": [call]}


def _call(name: str, **more: Any) -> ToolCall:
    function = FunctionCall(name=name, arguments="")
    return ToolCall(id=new_call_id(), type="function", function=function, **more)
