"""Grammars of answers that call tools, and of reasoning before an answer, in Lark's syntax."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from anabranch.llm.grammar.schema_limits import narrowed
from anabranch.llm.server.answer_pieces import BEGIN, END
from anabranch.llm.server.tool_format import GPT_OSS, ToolFormat
from anabranch.llm.server.tool_models import FunctionTool

MAX_CALLS = 16  # of one answer
_ANALYSIS = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")
_ANY = "(?s:.*)"
MAX_MESSAGES = 16  # of gpt-oss, before the last of an answer
# An answer of a format without a mark that begins so is a call.
_BARE = r'\s*\{\s*"(name|type|function|parameters|arguments)"'


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
    """One or more calls of these functions; exactly one unless `parallel`."""
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


class Thinking(NamedTuple):
    """The answer begins with reasoning, in which marks of calls begin none."""

    opened: bool  # by the prompt


def offer_grammar(
    written: ToolFormat,
    functions: Sequence[FunctionTool],
    texts: LarkTexts,
    *,
    parallel: bool,
    thinking: Thinking | None = None,
) -> str:
    """Any text, and valid calls once one begins; functions that are not strict take any object."""
    offered = [each if each.strict else each.without_schema() for each in functions]
    if written is GPT_OSS:
        return _channels(offered, texts)
    inside = written.listed or written.bare or written.around is not None
    rules = call_rules(written, offered, texts, parallel=parallel and inside, marked=False)
    first = [rf"\s*{_escaped(BEGIN)}{_ANY}"]
    lines = [rules, _answer("answer", written, texts, [], parallel=parallel)]
    if written.bare:
        lines.append(_bare_calls(offered, parallel=parallel))
    if thinking is None:
        lines.append("start: answer")
    elif thinking.opened or texts.is_special(BEGIN):
        opening = "" if thinking.opened else texts.lark(BEGIN) + " "
        lines.append(f"start: {'thought' if thinking.opened else 'thought?'} answer")
        lines.append(_thought(written, texts, opening))
    else:
        lines.append(_answer("first", written, texts, first, parallel=parallel))
        lines.append("start: first | thought answer")
        lines.append(f"thought[lazy]: /\\s*{_escaped(BEGIN)}{_ANY}{_escaped(END)}/")
    return "\n".join(lines) + "\n"


def _answer(
    name: str, written: ToolFormat, texts: LarkTexts, avoided: list[str], *, parallel: bool
) -> str:
    """Rules of an answer. Its first text matches none of `avoided`, and no text has a mark."""
    marks = dict.fromkeys((written.first_mark, *written.opens))
    within = [f"{_ANY}{_escaped(mark)}{_ANY}" for mark in marks]  # even letter by letter
    start = [*avoided, *([f"{_BARE}{_ANY}"] if written.bare else [])]
    bare = " | bare" if written.bare else ""
    again = parallel and not (written.listed or written.bare or written.around)
    upper = name.upper()
    lines = [
        f"{upper}_TEXT: {_excluding(f'/{_ANY}/', [*start, *within])}",
        f"{upper}_MORE: {_excluding(f'/{_ANY}/', within)}",
    ]
    if texts.is_special(written.first_mark):
        mark = texts.lark(written.first_mark)
        calls = f"({mark} calls {upper}_MORE){{0,{MAX_CALLS}}}" if again else f"({mark} calls)?"
        return "\n".join([f"{name}: {upper}_TEXT {calls}{bare}", *lines])
    mark = _escaped(written.first_mark)
    calls = f"{name}_lead calls"
    if again:
        calls += f" ({name}_next calls){{0,{MAX_CALLS - 1}}} {upper}_MORE"
        lines.append(f"{name}_next[lazy]: /{_ANY}{mark}/")
    lines.append(f"{name}_lead[lazy]: {upper}_LEAD")
    lines.append(f"{upper}_LEAD: {_excluding(f'/{_ANY}{mark}/', start)}")
    return "\n".join([f"{name}: {upper}_TEXT | {calls}{bare}", *lines])


def _bare_calls(functions: Sequence[FunctionTool], *, parallel: bool) -> str:
    """Calls that an answer begins with. The head is one lexeme, for text may begin like it."""
    kind = r'("type"\s*:\s*"function"\s*,\s*)?'
    lines = list[str]()
    for place, function in enumerate(functions):
        name = f'"name"\\s*:\\s*"{_escaped(function.name)}"'
        head = rf'\s*\{{\s*{kind}{name}\s*,\s*"parameters"\s*:'
        lines.append(f"bare_head_{place}[lazy]: /{head}/")
        arguments = json_rule(function.schema_of_arguments)
        lines.append(f'bare_{place}: bare_head_{place} /\\s{{0,2}}/ {arguments} /\\s{{0,2}}/ "}}"')
    more = f' ("; " call){{0,{MAX_CALLS - 1}}}' if parallel else ""
    first = " | ".join(f"bare_{place}" for place in range(len(functions)))
    return "\n".join([f"bare: ({first}){more}", *lines])


def _thought(written: ToolFormat, texts: LarkTexts, opening: str) -> str:
    """Reasoning, in which marks of calls begin none."""
    if not texts.is_special(END):
        lead = f"thought: {opening}thought_end\n"
        return lead + f"thought_end[lazy]: /{_ANY}{_escaped(END)}/"
    marks = " | ".join(map(texts.lark, texts.specials(written.all_marks)))
    marked = f" (({marks}) /{_ANY}/)*" if marks else ""
    return f"thought: {opening}/{_ANY}/{marked} {texts.lark(END)}"


def _channels(functions: Sequence[FunctionTool], texts: LarkTexts) -> str:
    """Messages on channels, of which the last may be a call."""
    channel, message = texts.lark("<|channel|>"), texts.lark("<|message|>")
    plain = f"{channel} /analysis|commentary|final/ {message} /{_ANY}/"
    kind = f'({texts.lark("<|constrain|>")} "json")?'
    lines = [
        f"start: message{{0,{MAX_MESSAGES}}} (last | call)",
        f"message: {plain} {texts.lark('<|end|><|start|>assistant')}",
        f"last: {plain}",
        "call: " + " | ".join(f"call_{place}" for place in range(len(functions))),
    ]
    for place, function in enumerate(functions):
        head = rf"/(commentary|analysis) to=functions\.{_escaped(function.name)} ?/"
        arguments = json_rule(function.schema_of_arguments)
        lines.append(f"call_{place}: {channel} {head} {kind} {message} {arguments}")
    return "\n".join(lines) + "\n"


def _excluding(pattern: str, excluded: Sequence[str]) -> str:
    return " & ".join([pattern, *(f"~/{each}/" for each in excluded)])


def _escaped(text: str) -> str:
    """Escape a text for a regex between slashes."""
    return re.escape(text).replace("/", r"\/")
