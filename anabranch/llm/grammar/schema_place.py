"""Where in a JSON schema something is wrong: the smallest part that cannot be compiled."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

MAX_TRIALS = 200  # parts that are compiled in the search
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")


def schema_place(text: str, error_of: Callable[[str], str]) -> str:
    """The path of the smallest part with an error, "" for the whole; `error_of` compiles a part."""
    schema = json.loads(text)
    if not isinstance(schema, dict):
        return ""
    schema = cast("dict[str, Any]", schema)
    shared = _shared(schema)
    path, trials = list[str](), 0
    while True:
        for below, part in _parts(schema):
            trials += 1
            if trials > MAX_TRIALS:
                return ".".join(path)
            if error_of(json.dumps({**shared, **part})):
                path, schema = [*path, below], part
                break
        else:
            return ".".join(path)


def _shared(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Definitions that parts refer to."""
    return {name: schema[name] for name in ("$defs", "definitions") if name in schema}


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Schemas directly inside one, with their place."""
    for key in _BY_NAME:
        named = schema.get(key)
        if isinstance(named, Mapping):
            for name, part in cast("Mapping[str, Any]", named).items():
                yield from _schema(f"{key}.{name}", part)
    for key in _LISTS:
        listed = schema.get(key)
        if isinstance(listed, list):
            for place, part in enumerate(cast("list[Any]", listed)):
                yield from _schema(f"{key}.{place}", part)
    for key in _SINGLE:
        yield from _schema(key, schema.get(key))


def _schema(place: str, part: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(part, Mapping):
        yield place, dict(cast("Mapping[str, Any]", part))
