"""Structured outputs in the notation of llguidance, the library that matches them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from anabranch.llm.grammar.schema_limits import check_lark, check_schema, narrowed
from anabranch.llm.grammar.structured_outputs import StructuredOutputs


def grammar_source(wanted: StructuredOutputs) -> str:
    """The grammar as llguidance reads it; ValueError for what would take too long or is no GBNF."""
    from llguidance import LLMatcher

    if wanted.prelude is not None:
        return _after_prelude(wanted)
    match wanted.kind:
        case "json" | "json_object":
            given = json.loads(wanted.text)
            check_schema(given)
            schema = json.dumps(narrowed(given), ensure_ascii=False)
            return LLMatcher.grammar_from_json_schema(schema, overrides=json_options(wanted))
        case "regex":
            return LLMatcher.grammar_from_regex(wanted.text)
        case "choice":
            choices = " | ".join(json.dumps(each) for each in wanted.choice or ())
            return LLMatcher.grammar_from_lark(f"start: {choices}")
        case _:
            lark = _as_lark(wanted.text)
            check_lark(lark)
            return LLMatcher.grammar_from_lark(lark)


def _after_prelude(wanted: StructuredOutputs) -> str:
    """Two grammars, of which the second is the form itself."""
    lark = f"start: prelude @form\n{wanted.prelude}"
    check_lark(lark)
    source = grammar_source(replace(wanted, prelude=None))
    is_lark = wanted.kind in ("choice", "grammar")  # others are JSON already
    form: dict[str, Any] = {"lark_grammar": source}
    if not is_lark:
        (form,) = json.loads(source)["grammars"]
    return json.dumps({"grammars": [{"lark_grammar": lark}, form | {"name": "form"}]})


def json_options(wanted: StructuredOutputs) -> Any:
    """How JSON may be written. Whitespace has a bound: models like to write it without end."""
    if wanted.disable_any_whitespace:
        return {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return {"whitespace_pattern": wanted.whitespace_pattern or r"[ \n\r\t]{1,16}"}


def _as_lark(text: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(text)
    except Exception as error:  # of whatever kind: the text is the client's
        raise ValueError(f"grammar is neither Lark nor GBNF: {error}") from None
