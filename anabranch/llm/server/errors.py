"""Errors in OpenAI's format, with a message that says what to change."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException as StarletteHTTPException

from anabranch.llm.engine.async_llm import EngineDead

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
}
REFUSED = "invalid_request_error"
_MESSAGES = {  # in place of the framework's
    400: "the body cannot be read: send JSON in UTF-8, without very deep nesting or long numbers",
    404: "there is nothing at this path; /docs lists what there is",
    405: "this path does not take this method; /docs lists what there is",
}


class RequestRefused(ValueError):
    """The engine does not run this request."""


class RequestBroken(RuntimeError):
    """The engine failed at this request and continues with the others."""


class ServerClosing(RuntimeError):
    """The server ends before the request is answered."""


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Body of every response that is an error."""

    error: ErrorDetail


EXPECTED_ERRORS = (EngineDead, TimeoutError, RequestRefused, RequestBroken, ServerClosing)

# for the OpenAPI document
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 403, 404, 408, 413, 415, 429, 500, 503)
}


class ApiError(HTTPException):
    """An answer other than the one asked for."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.param, self.code = param, code

    @property
    def body(self) -> str:
        """As JSON, in ASCII: a message may quote what is no valid text."""
        kind = "server_error" if self.status_code >= 500 else _KINDS.get(self.status_code, REFUSED)
        error = {"message": str(self.detail), "type": kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error})

    @property
    def response(self) -> Response:
        return Response(self.body, self.status_code, self.headers, "application/json")


def refused(param: str, message: str, code: str | None = None) -> ApiError:
    """A 400 about one field."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, message: str) -> ApiError:
    """A 400 about a field of OpenAI's that is not supported."""
    return refused(param, message, "unsupported")


@contextmanager
def blaming_the_request() -> Generator[None]:
    """Turn a ValueError within into RequestRefused: it is about the client's values."""
    try:
        yield
    except ValueError as error:
        raise RequestRefused(str(error)) from error


def as_api_error(error: BaseException) -> ApiError:
    """The answer to a request that ended with an exception."""
    match error:
        case ApiError():
            return error
        case EngineDead():
            return ApiError(500, str(error), code="engine_failed")
        case TimeoutError():
            headers = {"X-Should-Retry": "false"}  # read by OpenAI's client
            message = "the request took longer than this server allows; ask for fewer tokens"
            return ApiError(408, message, code="time_limit", headers=headers)
        case RequestRefused():
            return ApiError(400, str(error))
        case RequestBroken() if str(error).startswith("GrammarError: "):
            return ApiError(400, str(error).removeprefix("GrammarError: "), code="grammar")
        case RequestBroken():
            return ApiError(
                500, f"the engine failed at this request: {error}", code="request_failed"
            )
        case ServerClosing():
            message = "the server is shutting down; send the request to another, or later"
            return ApiError(503, message, code="shutting_down")
        case _:
            return ApiError(500, "the server failed to answer this request")


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


def install_handlers(app: FastAPI) -> None:
    """Answer every error of an app in OpenAI's format."""

    async def known(_: Request, error: Exception) -> Response:
        return as_api_error(error).response

    async def http(_: Request, error: Exception) -> Response:
        assert isinstance(error, StarletteHTTPException)
        headers = cast("dict[str, str] | None", error.headers)
        message = _MESSAGES.get(error.status_code, str(error.detail))
        return ApiError(error.status_code, message, headers=headers).response

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return invalid_request(error, request.headers.get("content-type", "")).response

    for kind in (ApiError, *EXPECTED_ERRORS, Exception):
        app.add_exception_handler(kind, known)
    app.add_exception_handler(StarletteHTTPException, http)
    app.add_exception_handler(RequestValidationError, invalid)
