"""Chat templates: Jinja programs of a model that write a conversation as its prompt.

They see what transformers' tokenizers show them, and run in Jinja's sandbox.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

END = "END_OF_WHAT_IS_CONTINUED "  # templates may strip the space

Message = dict[str, Any]


def render_chat(
    template: str, messages: Sequence[Message], *, continued: str | None = None, **variables: Any
) -> str:
    """The prompt of a conversation; it ends within the field `continued` of the last message."""
    if continued is None:
        return _compiled(template).render(messages=messages, **variables)
    if continued not in template:
        raise ValueError(f"the chat template has no field {continued!r} that could be continued")
    *before, last = messages
    text, marked = _marked(last, continued)
    written = _compiled(template).render(messages=[*before, marked], **variables)
    place = written.rfind(END.strip())
    if place < 0 or text.strip() not in written:
        raise ValueError(
            f"the chat template drops the {continued!r} of the last message, or a part of it, "
            f"so it cannot be continued: {text.strip()[:80]!r}"
        )
    kept = written[:place]
    return kept if written.startswith(END, place) else kept.rstrip()


def _marked(message: Message, field: str) -> tuple[str, Message]:
    """The text that is continued, and the message with a mark at its end."""
    marked = deepcopy(message)
    content = marked.get(field)
    if isinstance(content, str):
        marked[field] = content + END
        return content, marked
    for part in reversed(content if isinstance(content, list | tuple) else ()):
        if "text" in part:
            text = part["text"]
            part["text"] = text + END
            return text, marked
    raise ValueError(f"the last message has no text in {field!r} to continue")


@lru_cache(maxsize=16)
def _compiled(template: str) -> Template:
    extensions: list[Any] = ["jinja2.ext.loopcontrols", _GenerationBlock]
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions
    )
    environment.filters["tojson"] = _to_json
    functions: dict[str, Any] = {"raise_exception": _refuse, "strftime_now": _now}
    environment.globals.update(functions)
    return environment.from_string(template)


class _GenerationBlock(Extension):
    """`{% generation %}` marks what an assistant wrote, for those who train on it."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes characters of HTML."""
    options: Any = {"separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
