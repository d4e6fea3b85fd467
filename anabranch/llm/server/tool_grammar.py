"""Grammars of answers that call tools, and of reasoning before an answer, in Lark's syntax."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from anabranch.llm.grammar.schema_limits import narrowed
from anabranch.llm.server.reasoning import BEGIN, END
from anabranch.llm.server.tool_format import DEEPSEEK, GPT_OSS, ToolFormat
from anabranch.llm.server.tool_models import FunctionTool

_ANALYSIS = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")


class LarkTexts:
    """Texts of a model as grammars have them: special tokens are no text there."""

    def __init__(self, tokenizer: Any) -> None:
        specials: list[str] = list(tokenizer.all_special_tokens)
        added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
        specials += [str(token) for token in added.values() if getattr(token, "special", False)]
        self._ids = {text: tokenizer.convert_tokens_to_ids(text) for text in set(specials)}
        marks = sorted(self._ids, key=len, reverse=True)
        self._cut = re.compile("(" + "|".join(map(re.escape, marks)) + ")") if marks else None

    def lark(self, text: str) -> str:
        """Quoted, with special tokens by their number."""
        parts = [text] if self._cut is None else self._cut.split(text)
        return " ".join(
            f"<[{self._ids[part]}]>" if part in self._ids else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        )


def reasoning_prelude(texts: LarkTexts, *, opened: bool) -> str:
    """Rules named `prelude`: reasoning, which may be missing unless the prompt has opened it."""
    end = texts.lark(END)
    body = f"/(?s:.*)/ {end}" if end.startswith("<[") else "thought"
    lazy = "" if end.startswith("<[") else f"thought[lazy]: /(?s:.*)/ {end}\n"
    whole = body if opened else f"({texts.lark(BEGIN)} {body})?"
    return f"prelude: {whole} /[ \\n]{{0,4}}/\n{lazy}"


def channel_prelude(texts: LarkTexts) -> str:
    """The same for gpt-oss: analysis, then the header of the answer."""
    analysis = f"({texts.lark(_ANALYSIS[0])} /(?s:.*)/ {texts.lark(_ANALYSIS[1])})?"
    return f"prelude: {analysis} {texts.lark('<|channel|>final<|message|>')}\n"


def call_grammar(
    written: ToolFormat,
    functions: Sequence[FunctionTool],
    texts: LarkTexts,
    *,
    parallel: bool,
    prelude: str | None = None,
) -> str:
    """Calls of these functions, one or more; or exactly one."""
    if written is GPT_OSS:
        analysis = f"({texts.lark(_ANALYSIS[0])} /(?s:.*)/ {texts.lark(_ANALYSIS[1])})?"
        prelude, parallel = f"prelude: {analysis}\n", False
    rules = [_call(written, function, texts) for function in functions]
    calls = "call: " + " | ".join(f"call_{place}" for place in range(len(rules))) + "\n"
    calls += "".join(f"call_{place}: {rule}\n" for place, rule in enumerate(rules))
    start = f"start: {'prelude ' if prelude else ''}{_several(written, texts, parallel)}\n"
    return start + (prelude or "") + calls


def _several(written: ToolFormat, texts: LarkTexts, parallel: bool) -> str:
    between = {"mistral": '", "', "llama3": '"; "', "hermes": '"\\n"'}.get(written.name)
    more = f"({between + ' ' if between else ''}call){{0,15}}" if parallel else ""
    calls = f"call {more}"
    if written.listed:
        return f'{texts.lark(written.opens[0])} "[" {calls} "]"'
    if written is DEEPSEEK:
        begin, end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
        return f"{texts.lark(begin)} {calls} {texts.lark(end)}"
    return calls


def _call(written: ToolFormat, function: FunctionTool, texts: LarkTexts) -> str:
    arguments = narrowed(function.schema_of_arguments)
    if written.has_header:
        head = written.opens[0] + written.before.format(name=function.name)
        tail = written.after + written.closes
        return f"{texts.lark(head)} {_json(arguments)} {texts.lark(tail)}"
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"name": {"const": function.name}, written.arguments: arguments},
        "required": ["name", written.arguments],
        "additionalProperties": False,
    }
    for name in ("$defs", "definitions"):
        if name in arguments:
            schema[name] = arguments[name]
    if written.listed or written.bare:
        return _json(schema)
    begin, end = texts.lark(written.opens[0] + "\n"), texts.lark("\n" + written.closes)
    return f"{begin} {_json(schema)} {end}"


def _json(schema: dict[str, Any]) -> str:
    options = {"whitespace_pattern": r"[ \n]{1,8}"}
    return "%json " + json.dumps({"x-guidance": options} | schema, ensure_ascii=False)
