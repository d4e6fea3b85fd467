"""JSON schemas narrowed where llguidance 1.9 would take more than the schema does.

A time may have 60 seconds there, a local part of an address more than 64 characters, and a number
may equal an exclusive bound that is whole if the other bound lies within one of it. Multiples of
large numbers are refused: nothing else bounds the time and memory that they take.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from decimal import Decimal
from typing import Any, cast

_TIME = "^[^:]*:[^:]*:[0-5].*$"
PATTERNS = {"time": _TIME, "date-time": _TIME, "email": "^[^@]{1,64}@.{1,255}$"}
_KEEP = ("const", "enum", "default", "examples", "required")  # values, not schemas
SMALLEST_STEP = 1e-6  # from an exclusive bound to the next number

# Digits of numbers pass through as many states as the number that they are multiples of, and those
# of two numbers through as many as their product: 200,000 take 1 s and 40 MB, 3 million 50 and 800.
MAX_MULTIPLE = 100_000


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


def check_multiples(schema: Any) -> None:
    """Raise ValueError for numbers at `multipleOf` that are too large, each or together."""
    product = 1
    for number in _multiples(schema):
        product = math.lcm(product, _digits(number))
        if product > MAX_MULTIPLE:
            raise ValueError(
                f"multipleOf {str(number)[:40]} takes too much time: the least common multiple of "
                "these numbers in a schema, without points and zeros at their ends, is "
                f"{MAX_MULTIPLE} at most"
            )


def check_multiples_in_lark(text: str) -> None:
    """The same of all schemas in a grammar of Lark's syntax."""
    schemas = list[Any]()
    for found in re.finditer(r"%json\s*", text):
        with suppress(ValueError):  # no schema, or none that can be read
            schemas.append(json.JSONDecoder().raw_decode(text, found.end())[0])
    check_multiples(schemas)


def _multiples(schema: Any) -> Iterator[float]:
    parts = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, list):
            parts += cast("list[Any]", part)
        elif isinstance(part, Mapping):
            given = cast("Mapping[str, Any]", part)
            parts += given.values()
            yield from _given(given, "multipleOf")


def _digits(number: float) -> int:
    """A number without its sign, its point and zeros at the end."""
    digits = "".join(map(str, Decimal(str(number)).as_tuple().digits)).rstrip("0")
    return int(digits or "1")
