"""Reasoning and calls of tools are found in answers, however the text is cut into pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest

from anabranch.llm.server.answer_pieces import (
    AnswerPiece,
    ChannelParser,
    PieceKind,
    PieceParser,
    ReasoningParser,
    joined,
)
from anabranch.llm.server.tool_format import DEEPSEEK, HERMES, LLAMA3, MISTRAL, ToolFormat
from anabranch.llm.server.tool_parser import LONGEST_HEAD, ToolParser

CITY = {"city": 'B"a}s{e]l\n', "days": [1, {"a": None}]}
ONE = ("get_weather", CITY)
TWO = ("now", {})


def hermes(name: str, arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def deepseek(name: str, arguments: Any) -> str:
    head = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n"
    return f"{head}{json.dumps(arguments)}\n```<｜tool▁call▁end｜>"


def plain(name: str, arguments: Any, key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments})


CASES: dict[str, tuple[ToolFormat, str, str, list[Any]]] = {
    "no call": (HERMES, "Hello, <b>you</b>.\n", "Hello, <b>you</b>.\n", []),
    "hermes": (HERMES, "Wait.\n" + hermes(*ONE), "Wait.", [ONE]),
    "two hermes": (HERMES, hermes(*ONE) + "\n" + hermes(*TWO), "", [ONE, TWO]),
    "text after": (HERMES, hermes(*TWO) + "\nDone.", "Done.", [TWO]),
    "arguments first": (
        HERMES,
        '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>',
        "",
        [("f", {"a": 1})],
    ),
    "no JSON": (HERMES, "<tool_call>what", "<tool_call>what", []),
    "no JSON, then a call": (
        HERMES,
        "<tool_call>what</tool_call>\n" + hermes(*ONE),
        "<tool_call>what",
        [ONE],
    ),
    "a long head, then a call": (
        HERMES,
        '<tool_call>{"x": "' + "y" * LONGEST_HEAD + hermes(*TWO),
        '<tool_call>{"x": "' + "y" * LONGEST_HEAD,
        [TWO],
    ),
    "llama": (LLAMA3, plain(*ONE, "parameters"), "", [ONE]),
    "llama, tagged": (LLAMA3, "<|python_tag|>" + plain(*ONE, "parameters"), "", [ONE]),
    "two of llama": (
        LLAMA3,
        plain(*ONE, "parameters") + "; " + plain(*TWO, "parameters"),
        "",
        [ONE, TWO],
    ),
    "llama, text": (LLAMA3, "It rains.", "It rains.", []),
    "llama, other JSON, then text": (
        LLAMA3,
        '{"weather": "wet"} It rains.',
        '{"weather": "wet"} It rains.',
        [],
    ),
    "llama, other JSON": (LLAMA3, '{"weather": "wet"}', '{"weather": "wet"}', []),
    "mistral": (MISTRAL, f"[TOOL_CALLS] [{plain(*ONE)}, {plain(*TWO)}]", "", [ONE, TWO]),
    "deepseek": (
        DEEPSEEK,
        f"<｜tool▁calls▁begin｜>{deepseek(*ONE)}\n{deepseek(*TWO)}<｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>",  # special tokens, which are not shown
        [ONE, TWO],
    ),
    "deepseek 3.1": (
        DEEPSEEK,
        '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>',
        "",
        [("f", {"a": 1})],
    ),
}


def parsed(parser: PieceParser, text: str, size: int) -> list[AnswerPiece]:
    cuts = [text[start : start + size] for start in range(0, len(text), size)]
    pieces = [piece for cut in cuts for piece in parser.push(cut, final=False)]
    return joined([*pieces, *parser.push("", final=True)])


def calls_of(pieces: list[AnswerPiece]) -> list[tuple[str, Any]]:
    found: list[list[str]] = []
    for kind, text in pieces:
        if kind is PieceKind.CALL:
            found.append([text, ""])
        elif kind is PieceKind.ARGUMENTS:
            found[-1][1] += text
    return [(name, json.loads(arguments)) for name, arguments in found]


def text_of(pieces: list[AnswerPiece], kind: PieceKind = PieceKind.TEXT) -> str:
    return "".join(text for each, text in pieces if each is kind)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("case", CASES)
def test_calls_are_found(case: str, size: int) -> None:
    written, text, content, calls = CASES[case]
    pieces = parsed(ToolParser(written), text, size)
    assert calls_of(pieces) == calls
    assert text_of(pieces) == content


@pytest.mark.parametrize("after", ["", "\n"])
@pytest.mark.parametrize("case", CASES)
def test_calls_are_found_in_an_answer_that_comes_at_once(case: str, after: str) -> None:
    """White space after a call is no text."""
    written, text, content, calls = CASES[case]
    pieces = joined(ToolParser(written).push(text + after, final=True))
    assert calls_of(pieces) == calls
    assert text_of(pieces).rstrip("\n") == content.rstrip("\n")
    if calls and not content:
        assert not text_of(pieces)


@pytest.mark.parametrize(
    ("written", "head"),
    [
        (HERMES, '<tool_call>{"name": "f", "arguments": '),
        (LLAMA3, '{"name": "f", "parameters": '),
        (DEEPSEEK, "<｜tool▁call▁begin｜>f<｜tool▁sep｜>"),
    ],
    ids=lambda given: getattr(given, "name", ""),
)
def test_calls_are_told_before_they_end(written: ToolFormat, head: str) -> None:
    parser = ToolParser(written)
    pieces = parser.push(head, final=False)
    pieces += parser.push('{"a": ', final=False)
    assert joined(pieces) == [(PieceKind.CALL, "f"), (PieceKind.ARGUMENTS, '{"a": ')]


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content"),
    [
        ("<think>\nHm, </thin no.</think>\n\nYes.", False, "Hm, </thin no.", "Yes."),
        ("Hm.</think>Yes.", True, "Hm.", "Yes."),
        ("Hm.", True, "Hm.", ""),
        ("Yes. <think>", False, "", "Yes. <think>"),
        ("<thin", False, "", "<thin"),
        ("", False, "", ""),
    ],
)
def test_reasoning_is_separated(
    text: str, opened: bool, reasoning: str, content: str, size: int
) -> None:
    pieces = parsed(ReasoningParser(None, opened=opened), text, size)
    assert (text_of(pieces, PieceKind.REASONING), text_of(pieces)) == (reasoning, content)


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_a_call_follows_reasoning(size: int) -> None:
    text = "<think>Hm.</think>\n" + hermes(*ONE)
    pieces = parsed(ReasoningParser(ToolParser(HERMES), opened=False), text, size)
    assert text_of(pieces, PieceKind.REASONING) == "Hm."
    assert calls_of(pieces) == [ONE] and not text_of(pieces)


@pytest.mark.parametrize("size", [1, 6, 1000])
def test_channels_are_separated(size: int) -> None:
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary"
        " to=functions.get_weather <|constrain|>json<|message|>" + json.dumps(CITY) + "<|call|>"
    )
    pieces = parsed(ChannelParser(), text, size)
    assert text_of(pieces, PieceKind.REASONING) == "Hm." and not text_of(pieces)
    assert calls_of(pieces) == [ONE]
    final = "<|channel|>final<|message|>It rains.<|return|>"
    assert text_of(parsed(ChannelParser(), final, size)) == "It rains."
    assert text_of(parsed(ChannelParser(), "Plain text.", size)) == "Plain text."
