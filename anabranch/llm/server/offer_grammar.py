"""Grammars of answers that may call tools: any text, and valid calls once one has begun."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from anabranch.llm.server.reasoning import BEGIN, END
from anabranch.llm.server.tool_format import GPT_OSS, ToolFormat
from anabranch.llm.server.tool_grammar import MAX_CALLS, LarkTexts, call_rules, json_rule
from anabranch.llm.server.tool_models import FunctionTool

_ANY = "(?s:.*)"
MAX_MESSAGES = 16  # of gpt-oss, before the last of an answer
# An answer of a format without a mark that begins so is a call.
_BARE = r'\s*\{\s*"(name|type|function|parameters|arguments)"'


class Thinking(NamedTuple):
    """Of an answer whose reasoning comes before its text, and may mention calls."""

    opened: bool  # by the prompt


def offer_grammar(
    written: ToolFormat,
    functions: Sequence[FunctionTool],
    texts: LarkTexts,
    *,
    parallel: bool,
    thinking: Thinking | None = None,
) -> str:
    """Text and calls; arguments of functions that are not strict are any object."""
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
    """As part of a regex between slashes."""
    return re.escape(text).replace("/", r"\/")
