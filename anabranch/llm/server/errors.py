"""Errors in OpenAI's format, with a message that says what to change."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from fastapi import HTTPException
from fastapi.responses import Response
from pydantic import BaseModel

from anabranch.llm.engine.async_llm import EngineDead

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
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
        return error_body(self.status_code, str(self.detail), self.param, self.code)

    @property
    def response(self) -> Response:
        """To be sent."""
        return Response(self.body, self.status_code, self.headers, "application/json")


def unsupported(param: str, message: str) -> ApiError:
    """For a field that is known and does nothing here."""
    return ApiError(400, message, param=param, code="unsupported")


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
