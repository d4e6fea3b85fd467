"""Grammars of calls and of reasoning: what a family writes is taken, and anything else refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")
for needed in ("fastapi", "llguidance"):
    pytest.importorskip(needed)

from server_models import tiny_tokenizer  # noqa: E402

from anabranch.llm.grammar.grammar_compiler import GrammarCompiler  # noqa: E402
from anabranch.llm.grammar.structured_outputs import StructuredOutputs  # noqa: E402
from anabranch.llm.grammar.token_rules import num_words  # noqa: E402
from anabranch.llm.server.response_models import _merged  # noqa: E402  # pyright: ignore[reportPrivateUsage]
from anabranch.llm.server.tool_format import (  # noqa: E402
    DEEPSEEK,
    DEEPSEEK_V31,
    FORMATS,
    GPT_OSS,
    HERMES,
    LLAMA3,
    MISTRAL,
    detect_tool_format,
)
from anabranch.llm.server.tool_grammar import (  # noqa: E402
    LarkTexts,
    call_grammar,
    channel_prelude,
    reasoning_prelude,
)
from anabranch.llm.server.tool_models import FunctionTool  # noqa: E402

MARKS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<think>", "</think>", "<|channel|>"]
MARKS += ["<|message|>", "<|end|>", "<|start|>", "<|call|>", "<|constrain|>"]
MARKS += [f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end")]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "day": {"$ref": "#/$defs/day"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"day": {"type": "integer"}},
}
FUNCTIONS = [FunctionTool(name="weather", parameters=SCHEMA), FunctionTool(name="now")]
ONE, TWO = ("weather", {"city": "Basel", "day": 2}), ("now", {"x": 1})


class Spoken:
    """A tokenizer whose marks of calls are tokens of their own, or plain text."""

    def __init__(self, marked: bool) -> None:
        self.tokenizer = tiny_tokenizer()
        if marked:
            self.tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
        self._end = self.tokenizer.eos_token_id
        self._size = len(self.tokenizer)
        self._compiler = GrammarCompiler(self.tokenizer, self._size, [self._end])
        self.texts = LarkTexts(self.tokenizer)

    def takes(self, form: str | StructuredOutputs, text: str) -> bool:
        """Whether a text is a whole answer by a grammar."""
        wanted = StructuredOutputs(grammar=form) if isinstance(form, str) else form
        state = self._compiler.compile(wanted).begin()
        if not all(state.accepts(token) for token in self.tokenizer.encode(text)):
            return False
        if state.over:
            return True
        words = np.zeros(num_words(self._size), np.int32)
        state.fill(words)
        return bool(words[self._end // 32] >> (self._end % 32) & 1)


@pytest.fixture(scope="module", params=[True, False], ids=["marked", "plain"])
def spoken(request: pytest.FixtureRequest) -> Spoken:
    return Spoken(request.param)


def written(name: str, *calls: tuple[str, Any]) -> str:
    """Calls as a family of models writes them."""
    key = FORMATS[name].arguments
    plain = [json.dumps({"name": name, key: given}) for name, given in calls]
    match name:
        case "hermes":
            return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in plain)
        case "llama3":
            return "; ".join(plain)
        case "mistral":
            return f"[TOOL_CALLS][{', '.join(plain)}]"
        case "mistral-v11":
            return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(given)}" for name, given in calls)
        case "deepseek-v3.1":
            inner = "".join(
                f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(given)}<｜tool▁call▁end｜>"
                for name, given in calls
            )
            return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"
        case "deepseek":
            inner = "".join(
                f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(given)}"
                "\n```<｜tool▁call▁end｜>"
                for name, given in calls
            )
            return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"
        case _:  # what closes a call ends the answer
            return "".join(
                f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
                f"{json.dumps(given)}"
                for name, given in calls
            )


@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_taken_one_by_one_and_together(name: str, spoken: Spoken) -> None:
    several = call_grammar(FORMATS[name], FUNCTIONS, spoken.texts, parallel=True)
    single = call_grammar(FORMATS[name], FUNCTIONS, spoken.texts, parallel=False)
    for grammar in (several, single):
        assert spoken.takes(grammar, written(name, ONE))
        assert spoken.takes(grammar, written(name, TWO))
        for other in (("sun", {}), ("weather", {"day": 2}), ("weather", {"city": "x", "day": "2"})):
            assert not spoken.takes(grammar, written(name, other))
        for text in ("It rains.", "", written(name, ONE)[:-1]):
            assert not spoken.takes(grammar, text)
    assert spoken.takes(several, written(name, ONE, TWO)) == (name != "gpt-oss")
    assert not spoken.takes(single, written(name, ONE, TWO))


@pytest.mark.parametrize("opened", [True, False])
def test_reasoning_may_come_first(opened: bool, spoken: Spoken) -> None:
    prelude = reasoning_prelude(spoken.texts, opened=opened)
    grammar = call_grammar(HERMES, FUNCTIONS, spoken.texts, parallel=False, prelude=prelude)
    call = written("hermes", ONE)
    assert spoken.takes(grammar, f"Is it?\n</think>\n\n{call}") == opened
    assert spoken.takes(grammar, call) == (not opened)
    if not opened:
        assert spoken.takes(grammar, f"<think>Is it?\n</think>\n\n{call}")
    assert not spoken.takes(grammar, f"<think>Is it?{call}")


def test_channels_of_gpt_oss() -> None:
    spoken = Spoken(marked=True)
    analysis = "<|channel|>analysis<|message|>Is it?<|end|><|start|>assistant"
    calls = call_grammar(GPT_OSS, FUNCTIONS, spoken.texts, parallel=True)
    assert spoken.takes(calls, analysis + written("gpt-oss", ONE))
    form = StructuredOutputs(regex="[0-9]+", prelude=channel_prelude(spoken.texts))
    for before in (analysis, ""):
        assert spoken.takes(form, f"{before}<|channel|>final<|message|>42")
        assert not spoken.takes(form, f"{before}<|channel|>final<|message|>x")
    assert not spoken.takes(form, "42")


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        (["<|channel|>", "<tool_call>"], GPT_OSS),
        (["<tool_call>"], HERMES),
        (["[TOOL_CALLS]"], MISTRAL),
        (["<｜tool▁call▁begin｜>"], DEEPSEEK),
        (["<|python_tag|>"], LLAMA3),
        ([], HERMES),
    ],
)
def test_formats_are_known_by_their_marks(marks: list[str], expected: Any) -> None:
    class Known:
        chat_template = None

        def get_vocab(self) -> dict[str, int]:
            return {mark: place for place, mark in enumerate(marks)}

    assert detect_tool_format(Known()) is expected
    if expected is DEEPSEEK:
        for template, written in (("```json", DEEPSEEK), ("x", DEEPSEEK_V31)):
            known = Known()
            known.chat_template = template
            assert detect_tool_format(known) is written
    templated = Known()
    templated.chat_template = "[TOOL_CALLS]"
    if not marks:
        assert detect_tool_format(templated) is MISTRAL
        assert detect_tool_format(None) is HERMES


def test_calls_in_a_row_are_one_message() -> None:
    call = {"role": "assistant", "tool_calls": [1]}
    said = {"role": "assistant", "content": "x"}
    asked = {"role": "user", "content": "y"}
    assert _merged([asked, said, call, call | {"tool_calls": [2]}, asked, call]) == [
        asked,
        said | {"tool_calls": [1, 2]},
        asked,
        call,
    ]
    assert _merged([call, asked]) == [call, asked]
