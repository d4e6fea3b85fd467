"""How the served model writes reasoning and calls of tools, and what takes its answers apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from anabranch.llm.server.answer_pieces import PieceParser
from anabranch.llm.server.channels import ChannelParser
from anabranch.llm.server.reasoning import BEGIN, ReasoningParser, thinks
from anabranch.llm.server.tool_format import FORMATS, GPT_OSS, ToolFormat, detect_tool_format
from anabranch.llm.server.tool_grammar import LarkTexts
from anabranch.llm.server.tool_parser import ToolParser

TOOL_FORMATS = ("auto", *FORMATS)


@dataclass(frozen=True, slots=True)
class AnswerForms:
    """Of one model."""

    tools: ToolFormat
    thinks: bool  # between marks, which are taken apart
    channels: bool  # answers are messages on channels
    template_has_tools: bool
    special: frozenset[str]  # texts of special tokens
    texts: LarkTexts | None  # None without a tokenizer

    @property
    def always_parsed(self) -> bool:
        """Whether answers without tools are taken apart, too."""
        return self.thinks or self.channels

    def needs_special(self, *, with_tools: bool) -> bool:
        """Whether the marks are special tokens, which a text leaves out by default."""
        marks = [*self.tools.opens] if with_tools else []
        marks += [BEGIN] if self.thinks else []
        return self.channels or any(mark in self.special for mark in marks)

    def parser(self, *, with_tools: bool, reasoning_opened: bool) -> PieceParser | None:
        """Takes an answer apart; None where it is text alone."""
        if self.channels:
            return ChannelParser()
        tools = ToolParser(self.tools) if with_tools else None
        return ReasoningParser(tools, opened=reasoning_opened) if self.thinks else tools


def make_answer_forms(tokenizer: Any | None, tool_format: str, reasoning: bool) -> AnswerForms:
    """Of a model; "auto" is found by its template and vocabulary."""
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
