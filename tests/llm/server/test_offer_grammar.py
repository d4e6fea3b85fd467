"""Answers that may call tools: any text passes, and calls only if they match their schema."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("llguidance")
pytest.importorskip("pydantic")

from chat_families import CALLED, CHAT_FAMILIES, chat_tokenizer, token_ids

from anabranch.llm.grammar.grammar_compiler import GrammarCompiler
from anabranch.llm.grammar.structured_outputs import StructuredOutputs
from anabranch.llm.server.tool_format import FORMATS, ToolFormat, detect_tool_format
from anabranch.llm.server.tool_grammar import LarkTexts, Thinking, call_grammar, offer_grammar
from anabranch.llm.server.tool_models import FunctionTool

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Basel", "Bern"]}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
STRICT = FunctionTool(name="f", parameters=SCHEMA, strict=True)
LOOSE = FunctionTool(name="g.x", parameters=SCHEMA)
WRONG = {"city": "Rome", "days": 2}
each_family = pytest.mark.parametrize("family", CHAT_FAMILIES)


def format_of(family: str) -> ToolFormat:
    return FORMATS[family.partition(",")[0]]


@cache
def compiler(family: str) -> GrammarCompiler:
    tokenizer = chat_tokenizer(family)
    return GrammarCompiler(
        tokenizer, len(tokenizer), token_ids(family, *CHAT_FAMILIES[family].ends)
    )


def written(family: str, *calls: tuple[str, Any]) -> str:
    chat = CHAT_FAMILIES[family]
    each = [
        chat.call.replace("NAME", name).replace("ARGUMENTS", json.dumps(arguments))
        for name, arguments in calls
    ]
    return chat.calls.replace("*", chat.between.join(each)) if calls else ""


def accepts(family: str, grammar: str, text: str) -> tuple[str, bool]:
    """What of a text is left when the grammar takes no more, and whether it may end there."""
    state = compiler(family).compile(StructuredOutputs(grammar=grammar)).begin()
    tokenizer = chat_tokenizer(family)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    taken = 0
    for token in tokens:
        if not state.accepts(token):
            break
        taken += 1
    return tokenizer.decode(tokens[taken:]), state._matcher.is_accepting()


def offered(family: str, **options: Any) -> str:
    texts = LarkTexts(chat_tokenizer(family))
    given = {"parallel": True} | options
    return offer_grammar(format_of(family), [STRICT, LOOSE], texts, **given)


def plain(family: str, text: str) -> str:
    return f"<|channel|>final<|message|>{text}" if family == "gpt-oss" else text


@each_family
def test_the_format_is_found(family: str) -> None:
    assert detect_tool_format(chat_tokenizer(family)) is format_of(family)


@each_family
@pytest.mark.parametrize("text", ["", "It rains. ", '["a"] {"name": <b>', "a\n\n```json\n{}\n```"])
def test_any_text_passes(family: str, text: str) -> None:
    assert accepts(family, offered(family), plain(family, text)) == ("", True)


@each_family
@pytest.mark.parametrize("before", ["", "Wait.\n"])
def test_calls_pass_if_they_match(family: str, before: str) -> None:
    grammar = offered(family)
    lead = before
    if family == "gpt-oss" and before:
        lead = f"<|channel|>analysis<|message|>{before}<|end|><|start|>assistant"
    if family == "llama3" and before:
        lead += "<|python_tag|>"
    assert accepts(family, grammar, lead + written(family, ("f", CALLED))) == ("", True)
    left, may_end = accepts(family, grammar, lead + written(family, ("f", WRONG)))
    assert left.startswith("Rome") and not may_end
    assert accepts(family, grammar, lead + written(family, ("g.x", WRONG))) == ("", True)
    left, may_end = accepts(family, grammar, lead + written(family, ("other", CALLED)))
    assert left and not may_end


@each_family
def test_parallel_calls(family: str) -> None:
    if family == "gpt-oss":
        pytest.skip("it calls one function an answer")
    grammar = offered(family)
    two = written(family, ("f", CALLED), ("g.x", WRONG))
    assert accepts(family, grammar, two) == ("", True)
    left, may_end = accepts(family, grammar, written(family, ("g.x", WRONG), ("f", WRONG)))
    assert left.startswith("Rome") and not may_end
    left, _ = accepts(family, offered(family, parallel=False), two)
    assert left


@pytest.mark.parametrize("family", ["hermes", "mistral"])
@pytest.mark.parametrize("required", [False, True])
def test_sixteen_calls_are_the_most(family: str, required: bool) -> None:
    texts = LarkTexts(chat_tokenizer(family))
    grammar = call_grammar(format_of(family), [LOOSE], texts, parallel=True)
    grammar = grammar if required else offered(family)
    many = [("g.x", {"city": "Bern", "days": 1})] * 17
    assert accepts(family, grammar, written(family, *many[1:])) == ("", True)
    assert accepts(family, grammar, written(family, *many))[0]


@each_family
def test_what_holds_all_calls_comes_once(family: str) -> None:
    form = format_of(family)
    if not (form.listed or form.bare or form.around):
        pytest.skip("each call stands for itself")
    lead = form.opens[0] if form.bare else ""
    once = lead + written(family, ("g.x", WRONG))
    assert accepts(family, offered(family), once) == ("", True)
    left, _ = accepts(family, offered(family), once + once)
    assert left


@pytest.mark.parametrize("family", ["hermes", "hermes, spelled", "deepseek", "deepseek-v3.1"])
@pytest.mark.parametrize("opened", [False, True])
def test_reasoning_may_mention_calls(family: str, opened: bool) -> None:
    grammar = offered(family, thinking=Thinking(opened))
    wrong, right = written(family, ("f", WRONG)), written(family, ("f", CALLED))
    thought = f"{'' if opened else '<think>'}\nPerhaps {wrong}.</think>\n\n"
    assert accepts(family, grammar, thought) == ("", True)
    assert accepts(family, grammar, thought + "Yes. " + right) == ("", True)
    left, _ = accepts(family, grammar, thought + "Yes. " + wrong)
    assert left.startswith("Rome")
    if not opened:
        assert accepts(family, grammar, "Yes. " + right) == ("", True)
        assert accepts(family, grammar, wrong)[0].startswith("Rome")


@each_family
def test_required_calls(family: str) -> None:
    texts = LarkTexts(chat_tokenizer(family))
    grammar = call_grammar(format_of(family), [STRICT, LOOSE], texts, parallel=True)
    assert accepts(family, grammar, written(family, ("f", CALLED))) == ("", True)
    left, _ = accepts(family, grammar, written(family, ("f", WRONG)))
    assert left.startswith("Rome")
    assert accepts(family, grammar, plain(family, "It rains."))[1] is False
    if family != "gpt-oss":
        two = written(family, ("f", CALLED), ("g.x", CALLED))
        assert accepts(family, grammar, two) == ("", True)
