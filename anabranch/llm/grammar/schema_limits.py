"""JSON schemas narrowed where llguidance 1.9 would take more than the schema does.

A time may have 60 seconds there, a local part of an address more than 64 characters, and a number
may equal an exclusive bound that is whole if the other bound lies within one of it. Multiples of
large numbers, and texts that many patterns must match, are refused: nothing else bounds the time
that they take.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, cast
from urllib.parse import unquote

_TIME = "^[^:]*:[^:]*:[0-5].*$"
# No wider than an address: with [^@] and . the first mask of one takes 0.65 ms instead of 0.4.
_EMAIL = r"^[a-zA-Z0-9.!#$%&'*+/=?^_`{|}~-]{1,64}@[a-zA-Z0-9.\[\]-]{1,255}$"
PATTERNS = {"time": _TIME, "date-time": _TIME, "email": _EMAIL}
_KEEP = ("const", "enum", "default", "examples", "required")  # values, not schemas
SMALLEST_STEP = 1e-6  # from an exclusive bound to the next number

# Digits of numbers pass through as many states as the number that they are multiples of, and those
# of two numbers through as many as their product: 200,000 take 1 s and 40 MB, 3 million 50 and 800.
MAX_MULTIPLE = 100_000
# Patterns and formats of one text. Whether any text matches all is searched for: 12 take 0.5 s, 14
# take 6, 18 do not end.
MAX_PATTERNS = 10


def narrowed(schema: Any) -> Any:
    """A schema that takes the same, but for the cases above."""
    if isinstance(schema, list):
        return [narrowed(each) for each in cast("list[Any]", schema)]
    if not isinstance(schema, Mapping):
        return schema
    given = cast("Mapping[str, Any]", schema)
    found = {name: part if name in _KEEP else narrowed(part) for name, part in given.items()}
    pattern = PATTERNS.get(found.get("format", "")) if _is_text(found.get("format")) else None
    if pattern is not None:
        parts: Any = found.get("allOf", [])
        found["allOf"] = [*parts, {"pattern": pattern}] if isinstance(parts, list) else parts
    return _apart(found)


def _apart(schema: dict[str, Any]) -> dict[str, Any]:
    """Without an exclusive bound that is whole and within one of the other bound."""
    if schema.get("type") == "integer":
        return schema
    low = max(_given(schema, "minimum", "exclusiveMinimum"), default=-math.inf)
    high = min(_given(schema, "maximum", "exclusiveMaximum"), default=math.inf)
    for name, bound, step in (("Minimum", low, SMALLEST_STEP), ("Maximum", high, -SMALLEST_STEP)):
        exclusive = schema.get(f"exclusive{name}")
        if exclusive == bound and high - low <= 1 and float(bound).is_integer():
            schema = {key: part for key, part in schema.items() if key != f"exclusive{name}"}
            schema[name.lower()] = bound + step
    return schema


def _given(schema: Mapping[str, Any], *names: str) -> list[float]:
    return [schema[name] for name in names if _is_number(schema.get(name))]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def check_schema(schema: Any) -> None:
    """Raise ValueError for a schema that would take too long."""
    check_multiples([schema])
    found = _Patterns(schema)
    for part in _mappings(schema):
        patterns = found.of(part)
        if len(patterns) > MAX_PATTERNS:
            raise ValueError(
                f"a text that must match {len(patterns)} patterns and formats takes too much time, "
                f"the most is {MAX_PATTERNS}: {', '.join(sorted(patterns))[:80]}"
            )


def check_multiples(schemas: list[Any]) -> None:
    """Raise ValueError for numbers at `multipleOf` that are too large, each or together."""
    product = 1
    for number in (each for part in _mappings(schemas) for each in _given(part, "multipleOf")):
        product = math.lcm(product, _digits(number))
        if product > MAX_MULTIPLE:
            raise ValueError(
                f"multipleOf {str(number)[:40]} takes too much time: the least common multiple of "
                "these numbers in a schema, without points and zeros at their ends, is "
                f"{MAX_MULTIPLE} at most"
            )


def check_lark(text: str) -> None:
    """Raise ValueError for schemas in a grammar of Lark's syntax that would take too long."""
    schemas = list[Any]()
    for found in re.finditer(r"%json\s*", text):
        with suppress(ValueError):  # no schema, or none that can be read
            schemas.append(json.JSONDecoder().raw_decode(text, found.end())[0])
    for schema in schemas:
        check_schema(schema)
    check_multiples(schemas)


def _mappings(schema: Any) -> Iterator[Mapping[str, Any]]:
    """All objects in a schema."""
    parts = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, list):
            parts += cast("list[Any]", part)
        elif isinstance(part, Mapping):
            given = cast("Mapping[str, Any]", part)
            parts += given.values()
            yield given


class _Patterns:
    """Patterns and formats that one text must match, by `allOf`, references, and side by side."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._found: dict[int, frozenset[str]] = {}  # by the id of a part

    def of(self, part: Any) -> frozenset[str]:
        """Of a schema; where there are alternatives, of that with the most."""
        if not isinstance(part, Mapping):
            return frozenset()
        given = cast("Mapping[str, Any]", part)
        if id(given) not in self._found:
            self._found[id(given)] = frozenset()  # for references to itself
            own = {given[name] for name in ("pattern", "format") if _is_text(given.get(name))}
            parts = [self.of(each) for each in self._listed(given, "allOf")]
            parts.append(self.of(self._referred(given.get("$ref"))))
            for name in ("anyOf", "oneOf"):
                options = map(self.of, self._listed(given, name))
                parts.append(max(options, key=len, default=frozenset[str]()))
            self._found[id(given)] = frozenset[str]().union(own, *parts)
        return self._found[id(given)]

    def _listed(self, part: Mapping[str, Any], name: str) -> list[Any]:
        found = part.get(name)
        return cast("list[Any]", found) if isinstance(found, list) else []

    def _referred(self, reference: Any) -> Any:
        """What a reference within this schema means."""
        found: Any = self._root
        if not _is_text(reference) or not reference.startswith("#"):
            return None
        for name in reference[1:].split("/")[1:]:
            key = unquote(name).replace("~1", "/").replace("~0", "~")
            given = cast("Mapping[str, Any]", found if isinstance(found, Mapping) else {})
            found = given.get(key)
        return found


def _digits(number: float) -> int:
    """A number without its sign, its point and zeros at the end."""
    from decimal import Decimal  # seldom needed, and of half a megabyte

    digits = "".join(map(str, Decimal(str(number)).as_tuple().digits)).rstrip("0")
    return int(digits or "1")
