"""How the served model writes reasoning and calls of tools, and the messages of its answers."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from anabranch.llm.server.answer_pieces import (
    BEGIN,
    AnswerPiece,
    ChannelParser,
    PieceKind,
    PieceParser,
    ReasoningParser,
    joined,
    thinks,
)
from anabranch.llm.server.chat_models import AssistantMessage
from anabranch.llm.server.tool_format import FORMATS, GPT_OSS, ToolFormat, detect_tool_format
from anabranch.llm.server.tool_grammar import LarkTexts
from anabranch.llm.server.tool_models import FunctionCall, ToolCall
from anabranch.llm.server.tool_parser import ToolParser

TOOL_FORMATS = ("auto", *FORMATS)


@dataclass(frozen=True, slots=True)
class AnswerForms:
    """How one model writes its answers."""

    tools: ToolFormat
    thinks: bool  # between marks, which are parsed
    channels: bool  # answers are messages on channels
    template_has_tools: bool
    special: frozenset[str]  # texts of special tokens
    texts: LarkTexts | None  # None without a tokenizer

    @property
    def always_parsed(self) -> bool:
        """Whether answers are parsed even if no tools are offered."""
        return self.thinks or self.channels

    def needs_special(self, *, with_tools: bool) -> bool:
        """Whether the marks are special tokens, which decoding skips by default."""
        marks = [*self.tools.opens] if with_tools else []
        marks += [BEGIN] if self.thinks else []
        return self.channels or any(mark in self.special for mark in marks)

    def parser(self, *, with_tools: bool, reasoning_opened: bool) -> PieceParser | None:
        """A parser for one answer; None where answers are plain text."""
        if self.channels:
            return ChannelParser()
        tools = ToolParser(self.tools) if with_tools else None
        return ReasoningParser(tools, opened=reasoning_opened) if self.thinks else tools


def make_answer_forms(tokenizer: Any | None, tool_format: str, reasoning: bool) -> AnswerForms:
    """Of a model; "auto" detects the tool format by its template and vocabulary."""
    if tool_format not in TOOL_FORMATS:
        raise ValueError(
            f"tool_format must be one of {', '.join(TOOL_FORMATS)}, got {tool_format!r}"
        )
    found = detect_tool_format(tokenizer) if tool_format == "auto" else FORMATS[tool_format]
    template = str(getattr(tokenizer, "chat_template", None) or "")
    special = frozenset(tokenizer.all_special_tokens) if tokenizer is not None else frozenset[str]()
    return AnswerForms(
        tools=found,
        thinks=reasoning and found is not GPT_OSS and thinks(tokenizer),
        channels=reasoning and found is GPT_OSS,
        template_has_tools="tools" in template,
        special=special,
        texts=None if tokenizer is None else LarkTexts(tokenizer),
    )


def new_call_id() -> str:
    """Nine letters and digits, as Mistral's templates want them."""
    return secrets.token_hex(5)[:9]


class MessageWriter:
    """Writes one answer: reasoning, text and calls; without a parser, plain text."""

    def __init__(self, parser: PieceParser | None, shown: Callable[[str], str]) -> None:
        self._parser, self._shown = parser, shown
        self.is_plain = parser is None
        self.num_calls = 0

    def pieces(self, text: str, *, final: bool) -> list[AnswerPiece]:
        if self._parser is None:
            return [AnswerPiece(PieceKind.TEXT, text)] if text else []
        found = joined(self._parser.push(text, final=final))
        return [
            AnswerPiece(
                kind, self._shown(part) if kind in (PieceKind.TEXT, PieceKind.REASONING) else part
            )
            for kind, part in found
        ]

    def whole(self, text: str) -> AssistantMessage:
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
        if self.is_plain:
            return [{"content": text}]
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
