"""How a family of models writes calls of tools."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, cast

_DEEPSEEK = "<｜tool▁{}｜>"
# {"name": "f", "arguments": {...}}, up to where the arguments begin
NAMED_HEAD = re.compile(
    r'\s*\[?[\s,;]*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*'
)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Texts around calls.

    A call is a JSON object with a name and arguments, or, with `head`, arguments alone after a
    header of which a group of `head` is the name.
    """

    name: str
    opens: tuple[str, ...]  # any of them begins a call, or a list of calls
    head: re.Pattern[str] = NAMED_HEAD
    closes: str = ""  # after a call
    arguments: str = "arguments"  # the key of the arguments
    bare: bool = False  # an answer that begins with an object with a name is a call
    listed: bool = False  # calls are the items of a JSON array
    before: str = "{name}"  # what stands between `opens` and the arguments, where `head` is given
    after: str = ""  # what stands between the arguments and `closes`
    around: tuple[str, str] | None = None  # what stands before and after all calls of an answer
    between: str = ""  # two calls

    @property
    def first_mark(self) -> str:
        return self.around[0] if self.around else self.opens[0]

    @property
    def all_marks(self) -> str:
        """Every text around calls, one after the other."""
        return "".join((*self.opens, self.before, self.after, self.closes, *(self.around or ())))

    @property
    def has_header(self) -> bool:
        """Whether the name stands before the arguments, not beside them."""
        return self.head is not NAMED_HEAD


HERMES = ToolFormat("hermes", ("<tool_call>",), closes="</tool_call>", between="\n")
LLAMA3 = ToolFormat("llama3", ("<|python_tag|>",), arguments="parameters", bare=True, between="; ")
MISTRAL = ToolFormat("mistral", ("[TOOL_CALLS]",), listed=True, between=", ")
MISTRAL_V11 = ToolFormat(
    "mistral-v11",
    ("[TOOL_CALLS]",),
    head=re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\][\w-]*)?\[ARGS\]\s*"),
    before="{name}[ARGS]",
)
DEEPSEEK = ToolFormat(
    "deepseek",
    (_DEEPSEEK.format("call▁begin"),),
    head=re.compile(
        rf"function{_DEEPSEEK.format('sep')}([\w.-]+)\n```json\n"  # V3 and R1
        rf"|(?!function{_DEEPSEEK.format('sep')})([\w.-]+){_DEEPSEEK.format('sep')}"  # V3.1
    ),
    closes=_DEEPSEEK.format("call▁end"),
    before="function" + _DEEPSEEK.format("sep") + "{name}\n```json\n",
    after="\n```",
    around=(_DEEPSEEK.format("calls▁begin"), _DEEPSEEK.format("calls▁end")),
)
DEEPSEEK_V31 = replace(
    DEEPSEEK, name="deepseek-v3.1", before="{name}" + _DEEPSEEK.format("sep"), after=""
)
GPT_OSS = ToolFormat(
    "gpt-oss",
    ("<|channel|>commentary to=functions.", "<|channel|>analysis to=functions."),
    head=re.compile(r"([\w.-]+)[^<]*(?:<\|constrain\|>json)?<\|message\|>"),
    closes="<|call|>",
    before="{name} <|constrain|>json<|message|>",
)
FORMATS = {
    each.name: each
    for each in (HERMES, LLAMA3, MISTRAL, MISTRAL_V11, DEEPSEEK, DEEPSEEK_V31, GPT_OSS)
}


def detect_tool_format(tokenizer: Any | None) -> ToolFormat:
    """By the marks that a model's template or vocabulary has; Hermes' where there are none."""
    template = getattr(tokenizer, "chat_template", None) or ""
    text = str(cast("object", template))
    known: dict[str, int] = tokenizer.get_vocab() if tokenizer is not None else {}
    if "<|channel|>" in known:
        return GPT_OSS
    if "<tool_call>" in text or "<tool_call>" in known:
        return HERMES
    if "[TOOL_CALLS]" in text or "[TOOL_CALLS]" in known:
        return MISTRAL_V11 if "[ARGS]" in known else MISTRAL
    if _DEEPSEEK.format("call▁begin") in known:
        return DEEPSEEK if "```json" in text or not text else DEEPSEEK_V31
    return LLAMA3 if "<|python_tag|>" in known else HERMES
