"""What an answer must match, as a request states it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

KINDS = ("json", "regex", "choice", "grammar", "json_object")
MAX_BYTES = 1 << 17  # of a grammar; one as large takes seconds to compile


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """A form of answers; exactly one kind is given. The names are vLLM's.

    `json` is a JSON schema, as text or as an object; properties come in its order. `regex` must
    match the whole answer. `grammar` is in Lark's syntax or in GBNF. `json_object` is any object.
    """

    json: str | Mapping[str, Any] | bool | None = None  # a JSON schema
    regex: str | None = None  # that matches the whole answer
    choice: Sequence[str] | None = None  # texts, one of which is the answer
    grammar: str | None = None  # Lark's syntax or GBNF
    json_object: bool = False  # any JSON object
    whitespace_pattern: str | None = None  # between the tokens of JSON; None allows any
    disable_any_whitespace: bool = False  # none but what the separators have
    prelude: str | None = None  # Lark rules, `prelude` first: what stands before, as reasoning does

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if self.json is False:
            raise ValueError("structured_outputs: the schema false accepts no answer")
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs takes exactly one of {', '.join(KINDS)}, "
                f"got {', '.join(given) or 'none'}"
            )
        for name in ("json_object", "disable_any_whitespace"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r:.80}")
        for name in ("regex", "grammar", "whitespace_pattern", "prelude"):
            _check_text(name, getattr(self, name))
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        size = len(self.text.encode(errors="surrogatepass"))
        if size > MAX_BYTES:
            raise ValueError(f"{self.kind} has {size} bytes, the most is {MAX_BYTES}")
        try:
            self.text.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{self.kind} holds half a surrogate pair") from None

    @property
    def kind(self) -> str:
        """Which of KINDS is given."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))

    @property
    def text(self) -> str:
        """What is given, as one text."""
        value = getattr(self, self.kind)
        if self.kind == "json_object":
            return '{"type":"object"}'
        return json.dumps(value) if self.kind == "choice" else cast("str", value)


def structured_outputs(given: Any) -> StructuredOutputs | None:
    """From its fields, as of a JSON body."""
    if given is None or isinstance(given, StructuredOutputs):
        return given
    if not isinstance(given, Mapping):
        raise ValueError(
            f"structured_outputs must be StructuredOutputs or its fields, got {given!r:.80}"
        )
    options = dict(cast("Mapping[str, Any]", given))
    known = {field.name for field in fields(StructuredOutputs)}
    if unknown := sorted(set(map(str, options)) - known):
        raise ValueError(f"unknown fields of structured_outputs: {', '.join(unknown)[:200]}")
    return StructuredOutputs(**options)


def _check_text(name: str, value: Any) -> None:
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{name} must be text, got {value!r:.80}")


def _schema_text(schema: Any) -> str:
    """The schema as JSON. One given as text must be valid JSON."""
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(value, Mapping | bool):
            raise ValueError(f"json must be a schema, an object, got {value!r:.80}")
        return schema if isinstance(schema, str) else json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise ValueError("json is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"json is no valid JSON: {error}") from None
    except TypeError as error:
        raise ValueError(f"json is no JSON schema: {error}") from None


def _choices(choice: Any) -> tuple[str, ...]:
    if isinstance(choice, str) or not isinstance(choice, Sequence) or not choice:
        raise ValueError(f"choice must be a list of texts, got {choice!r:.80}")
    for each in cast("Sequence[Any]", choice):
        if not isinstance(each, str) or not each:
            raise ValueError(f"choice must hold texts that are not empty, got {each!r:.80}")
    return tuple(cast("Sequence[str]", choice))
