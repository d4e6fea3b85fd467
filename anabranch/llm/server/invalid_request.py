"""What is wrong with a body: which field, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from fastapi.exceptions import RequestValidationError

from anabranch.llm.server.errors import ApiError


def invalid_request(error: RequestValidationError, content_type: str) -> ApiError:
    """The answer to a body that its model does not accept."""
    errors = error.errors()
    if errors[0]["type"] == "json_invalid":
        where, why = errors[0]["loc"][-1], errors[0]["ctx"]["error"]
        return ApiError(400, f"the body is not valid JSON at character {where}: {why}")
    if tuple(errors[0]["loc"]) == ("body",) and "json" not in content_type:
        return ApiError(
            415, f"send a JSON body with Content-Type: application/json, not {content_type!r}"
        )
    path, told = _furthest(errors, error.body)
    field = ".".join(map(str, path)) or None
    message = "; or ".join(dict.fromkeys(_reason(each, error.body, path) for each in told))
    return ApiError(400, f"{field or 'body'}: {message}", param=field)


def _furthest(errors: Sequence[Any], body: Any) -> tuple[list[str | int], list[Any]]:
    """Where the first error is, and what is wrong there.

    Where several alternatives were tried, those that went deepest into the body count, and among
    them those that had the right type: the others are not what the client meant.
    """
    paths = [_path(each, body) for each in errors]
    below = [path for path in paths if path[: len(paths[0])] == paths[0]]
    deepest = max(below, key=len)
    there = [each for each, path in zip(errors, paths, strict=True) if path == deepest]
    return deepest, [each for each in there if not each["type"].endswith("_type")] or there


def _path(error: Any, body: Any) -> list[str | int]:
    """Where in the body an error is. Between names, pydantic writes which alternative it tried."""
    path: list[str | int] = []
    value, parts = body, error["loc"][1:]
    for place, part in enumerate(parts):
        missing = error["type"] == "missing" and place == len(parts) - 1
        if isinstance(value, dict) and isinstance(part, str) and (part in value or missing):
            path.append(part)
            value = cast("dict[str, Any]", value).get(part)
        elif isinstance(value, list) and isinstance(part, int):
            path.append(part)
            value = cast("list[Any]", value)[part]
    return path


def _reason(error: Any, body: Any, path: Sequence[str | int]) -> str:
    if error["type"] == "extra_forbidden":
        return "is not a field of this request; leave it out"
    if error["type"] == "missing":
        is_null = bool(path) and path[-1] in _value_at(body, path[:-1])
        return "must not be null; give a value" if is_null else error["msg"]
    return f"{error['msg']}, got {_short(error['input'])}"


def _value_at(body: Any, path: Sequence[str | int]) -> Any:
    for part in path:
        body = body[part]
    return body


def _short(value: Any) -> str:
    if isinstance(value, dict | list):
        sized = cast("dict[Any, Any] | list[Any]", value)
        return f"{type(sized).__name__} of {len(sized)}"
    text = repr(value[:60]) if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
