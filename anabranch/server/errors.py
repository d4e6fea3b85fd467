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

from anabranch.engine.async_llm import EngineDead

_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
}

_SAY = {  # in place of what the framework says
    400: "the body cannot be read: send JSON in UTF-8, without very deep nesting or long numbers",
    404: "there is nothing at this path; /docs lists what there is",
    405: "this path does not take this method; /docs lists what there is",
}


class RequestRefused(ValueError):
    """The engine does not run this request."""


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Body of every response that is an error."""

    error: ErrorDetail


# for the OpenAPI document
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 404, 408, 413, 415, 429, 500, 503)
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
        return error_body(self.status_code, str(self.detail), self.param, self.code)

    @property
    def response(self) -> Response:
        """To be sent."""
        return Response(self.body, self.status_code, self.headers, "application/json")


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> str:
    """JSON of an error."""
    kind = "server_error" if status >= 500 else _KINDS.get(status, "invalid_request_error")
    error = {"message": message, "type": kind, "param": param, "code": code}
    return json.dumps({"error": error})


@contextmanager
def blaming_the_request() -> Generator[None]:
    """A ValueError within is about values that the client sent."""
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
        case _:
            return ApiError(500, "the server failed to answer this request")


def install(app: FastAPI) -> None:
    """Have every error of an app answered in this format."""

    async def known(_: Request, error: Exception) -> Response:
        return as_api_error(error).response

    async def http(_: Request, error: Exception) -> Response:
        assert isinstance(error, StarletteHTTPException)
        headers = cast("dict[str, str] | None", error.headers)
        message = _SAY.get(error.status_code, str(error.detail))
        return ApiError(error.status_code, message, headers=headers).response

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _invalid(request, error.errors()).response

    for kind in (ApiError, EngineDead, TimeoutError, RequestRefused, Exception):
        app.add_exception_handler(kind, known)
    app.add_exception_handler(StarletteHTTPException, http)
    app.add_exception_handler(RequestValidationError, invalid)


def _invalid(request: Request, errors: Sequence[Any]) -> ApiError:
    kind = request.headers.get("content-type", "")
    if errors and errors[0]["type"] == "json_invalid":
        where, why = errors[0]["loc"][-1], errors[0]["ctx"]["error"]
        return ApiError(400, f"the body is not valid JSON at character {where}: {why}")
    if errors and tuple(errors[0]["loc"]) == ("body",) and "json" not in kind:
        return ApiError(415, f"send a JSON body with Content-Type: application/json, not {kind!r}")
    field = _field(errors[0])
    reasons = [_reason(error) for error in errors if _field(error) == field]
    return ApiError(400, f"{field or 'body'}: {'; or '.join(dict.fromkeys(reasons))}", param=field)


def _field(error: Any) -> str | None:
    loc = [str(part) for part in error["loc"] if part != "body"]
    return loc[0] if loc else None


def _reason(error: Any) -> str:
    if error["type"] == "extra_forbidden":
        return "is not a field of this request; leave it out"
    given = "" if error["type"] == "missing" else f", got {_short(error['input'])}"
    within = [str(part) for part in error["loc"][2:] if isinstance(part, int)]
    place = f" (at {'.'.join(within)})" if within else ""
    return f"{error['msg']}{place}{given}"


def _short(value: Any) -> str:
    if isinstance(value, dict | list):
        sized = cast("dict[Any, Any] | list[Any]", value)
        return f"{type(sized).__name__} of {len(sized)}"
    text = repr(value[:60]) if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
