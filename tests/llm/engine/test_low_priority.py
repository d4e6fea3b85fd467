"""Only the library works at low priority: whoever runs Python there makes steps wait for a core."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("llguidance")

import llguidance
from server_models import engine_config, tiny_tokenizer

from anabranch.llm.engine.engine import Engine
from anabranch.llm.grammar import grammar_compiler
from anabranch.llm.grammar.grammar_compiler import GrammarCompiler
from anabranch.llm.grammar.lexers import Lexers, LexerUse
from anabranch.llm.grammar.low_priority import LOW_PRIORITY, at_low_priority
from anabranch.llm.grammar.structured_outputs import StructuredOutputs
from anabranch.llm.sampling.params import SamplingParams

linux = pytest.mark.skipif(sys.platform != "linux", reason="priorities belong to processes")
WRONG = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}


def nice() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@linux
def test_a_call_aside_has_a_low_priority_and_its_caller_keeps_its_own() -> None:
    before = nice()
    assert at_low_priority(nice) == max(before, LOW_PRIORITY)
    assert nice() == before


def test_what_a_call_aside_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        at_low_priority(lambda: 1 // 0)


@linux
@pytest.mark.parametrize("aside", [False, True])
@pytest.mark.parametrize("schema", [{"type": "integer"}, WRONG])
def test_schemas_are_read_at_the_priority_of_steps(
    schema: dict[str, Any], aside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, set[int]] = {}

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **options: Any) -> Any:
            seen.setdefault(name, set()).add(nice())
            return call(*given, **options)

        return run

    for name in ("grammar_source", "schema_place"):
        monkeypatch.setattr(grammar_compiler, name, noted(name, getattr(grammar_compiler, name)))
    monkeypatch.setattr(llguidance, "LLMatcher", Noted(noted("LLMatcher", llguidance.LLMatcher)))
    tokenizer, before = tiny_tokenizer(), nice()
    compiler = GrammarCompiler(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    try:
        compiler.compile(StructuredOutputs(json=schema), aside=aside)
    except ValueError:
        assert schema is WRONG
        assert seen.pop("schema_place") == {before}
    assert seen == {
        "grammar_source": {before},
        "LLMatcher": {max(before, LOW_PRIORITY) if aside else before},
    }


class Noted:
    """The library's class, whose construction is noted."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make, self._given = make, llguidance.LLMatcher

    def __call__(self, *given: Any, **options: Any) -> Any:
        return self._make(*given, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._given, name)


def test_engines_compile_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, lexers = list[bool](), Lexers.reserve

    def reserve(self: Lexers, num_seqs: int, *, aside: bool = False) -> list[LexerUse]:
        asked.append(aside)
        return lexers(self, num_seqs, aside=aside)

    monkeypatch.setattr(Lexers, "reserve", reserve)
    params = SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]
    Engine(engine_config(max_model_len=64)).compile_grammar(params)
    assert asked == [True]


def test_a_prepared_compiler_reads_no_vocabulary_for_its_first_grammar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = tiny_tokenizer()
    compiler = GrammarCompiler(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    compiler.prepare()
    monkeypatch.setattr(llguidance, "LLTokenizer", None)
    compiler.compile(StructuredOutputs(regex="a"))


def test_what_cannot_be_prepared_is_said_to_the_first_grammar() -> None:
    compiler = GrammarCompiler(None, 9, [0])
    compiler.prepare()
    with pytest.raises(ValueError, match="no tokenizer"):
        compiler.compile(StructuredOutputs(regex="a"))
