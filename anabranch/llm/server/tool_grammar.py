"""Grammars of answers that call tools, and of reasoning before an answer, in Lark's syntax."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from anabranch.llm.grammar.schema_limits import narrowed
from anabranch.llm.server.reasoning import BEGIN, END
from anabranch.llm.server.tool_format import GPT_OSS, ToolFormat
from anabranch.llm.server.tool_models import FunctionTool

MAX_CALLS = 16  # of one answer
_ANALYSIS = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")


class LarkTexts:
    """Texts of a model as grammars have them: special tokens are no text there.

    For llguidance, added tokens between < and > are special, whatever the tokenizer says of them.
    """

    def __init__(self, tokenizer: Any) -> None:
        specials: list[str] = list(tokenizer.all_special_tokens)
        added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
        for token in added.values():
            text = str(token)
            if getattr(token, "special", False) or (text.startswith("<") and text.endswith(">")):
                specials.append(text)
        self._ids = {text: tokenizer.convert_tokens_to_ids(text) for text in set(specials)}
        marks = sorted(self._ids, key=len, reverse=True)
        self._cut = re.compile("(" + "|".join(map(re.escape, marks)) + ")") if marks else None

    def is_special(self, text: str) -> bool:
        """Whether a text is one special token, which no text of an answer holds."""
        return text in self._ids

    def specials(self, text: str) -> list[str]:
        """The special tokens that a text holds, each once."""
        return list(dict.fromkeys(part for part in self._parts(text) if part in self._ids))

    def lark(self, text: str) -> str:
        """Quoted, with special tokens by their number."""
        return " ".join(
            f"<[{self._ids[part]}]>" if part in self._ids else json.dumps(part, ensure_ascii=False)
            for part in self._parts(text)
            if part
        )

    def _parts(self, text: str) -> list[str]:
        return [text] if self._cut is None else self._cut.split(text)


def reasoning_prelude(texts: LarkTexts, *, opened: bool) -> str:
    """Rules named `prelude`: reasoning, which may be missing unless the prompt has opened it."""
    end = texts.lark(END)
    body = f"/(?s:.*)/ {end}" if end.startswith("<[") else "thought"
    lazy = "" if end.startswith("<[") else f"thought[lazy]: /(?s:.*)/ {end}\n"
    body += " /[ \\n]{0,4}/"
    whole = body if opened else f"({texts.lark(BEGIN)} {body})?"
    return f"prelude: {whole}\n{lazy}"


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
    start = f"start: {'prelude ' if prelude else ''}calls\n"
    return start + (prelude or "") + call_rules(written, functions, texts, parallel=parallel)


def call_rules(
    written: ToolFormat,
    functions: Sequence[FunctionTool],
    texts: LarkTexts,
    *,
    parallel: bool,
    marked: bool = True,
) -> str:
    """Rules named `calls`: calls of these functions; without the first mark unless `marked`."""
    rules = [_call(written, function, texts) for function in functions]
    call = "call: " + " | ".join(f"call_{place}" for place in range(len(rules))) + "\n"
    call += "".join(f"call_{place}: {rule}\n" for place, rule in enumerate(rules))
    mark = texts.lark(written.first_mark) + " " if marked else ""
    each = texts.lark(written.opens[0]) + " "
    between = texts.lark(written.between) + " " if written.between else ""
    if written.listed:
        calls = f'{mark}/ ?/ "[" call {_more(f"{between}call", parallel)} "]"'
    elif written.around:
        more = _more(f"/\\n?/ {each}call", parallel)
        calls = f"{mark}/\\n?/ {each}call {more} /\\n?/ {texts.lark(written.around[1])}"
    elif written.bare:
        calls = f"call {_more(f'{between}call', parallel)}"
    else:
        calls = f"{mark}call {_more(f'{between}{each}call', parallel)}"
    return f"calls: {calls}\n{call}"


def _more(rule: str, parallel: bool) -> str:
    return f"({rule}){{0,{MAX_CALLS - 1}}}" if parallel else ""


def _call(written: ToolFormat, function: FunctionTool, texts: LarkTexts) -> str:
    """One call, after its mark."""
    arguments = function.schema_of_arguments
    if written.has_header:
        head = texts.lark(written.before.format(name=function.name))
        # gpt-oss closes a call with a token that ends the answer, so the grammar ends before it
        tail = texts.lark(written.after + ("" if written is GPT_OSS else written.closes))
        return f"{head} {json_rule(arguments)} {tail}"
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
        return json_rule(schema)
    return f"/\\s{{0,2}}/ {json_rule(schema)} /\\s{{0,2}}/ {texts.lark(written.closes)}"


def json_rule(schema: dict[str, Any]) -> str:
    """JSON of a schema, as a part of a rule."""
    options = {"whitespace_pattern": r"[ \n]{1,8}"}
    return "%json " + json.dumps({"x-guidance": options} | narrowed(schema), ensure_ascii=False)
