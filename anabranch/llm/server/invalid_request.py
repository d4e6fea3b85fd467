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
    paths = [_path(each, error.body) for each in errors]
    first = paths[0]
    reasons = [
        _reason(each, path[len(first) :])
        for each, path in zip(errors, paths, strict=True)
        if path[: len(first)] == first
    ]
    field = ".".join(map(str, first)) or None
    message = "; or ".join(dict.fromkeys(reasons))
    return ApiError(400, f"{field or 'body'}: {message}", param=field)


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


def _reason(error: Any, below: Sequence[str | int]) -> str:
    if error["type"] == "extra_forbidden":
        return "is not a field of this request; leave it out"
    given = "" if error["type"] == "missing" else f", got {_short(error['input'])}"
    place = f" (at {'.'.join(map(str, below))})" if below else ""
    return f"{error['msg']}{place}{given}"


def _short(value: Any) -> str:
    if isinstance(value, dict | list):
        sized = cast("dict[Any, Any] | list[Any]", value)
        return f"{type(sized).__name__} of {len(sized)}"
    text = repr(value[:60]) if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
