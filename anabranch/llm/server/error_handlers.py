"""Every error of an app answered in OpenAI's format."""

from __future__ import annotations

from typing import cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException as StarletteHTTPException

from anabranch.llm.server.errors import EXPECTED_ERRORS, ApiError, as_api_error
from anabranch.llm.server.invalid_request import invalid_request

_MESSAGES = {  # in place of the framework's
    400: "the body cannot be read: send JSON in UTF-8, without very deep nesting or long numbers",
    404: "there is nothing at this path; /docs lists what there is",
    405: "this path does not take this method; /docs lists what there is",
}


def install(app: FastAPI) -> None:
    """Add the handlers to an app."""

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
