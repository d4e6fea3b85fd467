"""What is looked at before a request is read: its host, its key and its size."""

from __future__ import annotations

import secrets

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from anabranch.llm.server.body_values import MAX_CONTAINERS, MAX_VALUES, has_many_values
from anabranch.llm.server.errors import ApiError
from anabranch.llm.server.host_names import HostNames

# paths that need no key: the page, what it is made of, and how the server is
OPEN = frozenset({"/", "/docs", "/openapi.json", "/health", "/version", "/metrics", "/stats"})
OPEN_FOLDER = "/page/"


class Gate:
    """ASGI middleware that turns away requests to other hosts or without the key, and large bodies.

    Blanks around a key do not count. Without `hosts`, every host is answered.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_key: str | None,
        max_body_bytes: int,
        hosts: HostNames | None = None,
    ) -> None:
        self._app = app
        self._api_key = None if api_key is None else checked_key(api_key).encode()
        self._max_bytes = max_body_bytes
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with an error, or pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        error = (
            self._refuse_host(headers)
            or self._refuse_key(scope["path"], headers)
            or self._refuse_length(headers)
        )
        if error is not None:
            await error.response(scope, receive, send)
            return
        await self._app(scope, self._counted(receive), send)

    def _refuse_host(self, headers: Headers) -> ApiError | None:
        host = headers.get("host")  # browsers send it always, HTTP/1.0 need not
        if self._hosts is None or host is None or self._hosts.holds(host):
            return None
        return ApiError(
            403,
            f"there is no host {host[:100]!r} here; if it should be, start the server with "
            "--allowed-host and its name",
            code="unknown_host",
        )

    def _refuse_key(self, path: str, headers: Headers) -> ApiError | None:
        if self._api_key is None or path in OPEN or path.startswith(OPEN_FOLDER):
            return None
        # Starlette reads headers as Latin-1, whatever bytes they hold
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and secrets.compare_digest(
            given.strip().encode("latin-1"), self._api_key
        ):
            return None
        say = "the API key is wrong" if given else "there is no API key"
        return ApiError(
            401,
            f"{say}: send the header 'Authorization: Bearer KEY'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )

    def _refuse_length(self, headers: Headers) -> ApiError | None:
        length = headers.get("content-length", "")
        if length.isdigit() and int(length[:20]) > self._max_bytes:
            return self._too_large()
        return None

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body exceeds {self._max_bytes} bytes; send less at once")

    def _counted(self, receive: Receive) -> Receive:
        """For bodies that do not say how long they are, and for what they hold."""
        size, chunks = 0, list[bytes]()

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > self._max_bytes:
                raise self._too_large()
            if not message.get("more_body"):
                if has_many_values(chunks):
                    raise ApiError(
                        413,
                        f"the body holds more than {MAX_VALUES} values or {MAX_CONTAINERS} lists "
                        "and objects; send less at once",
                    )
                chunks.clear()
            return message

        return counted


def checked_key(api_key: str) -> str:
    """The key without blanks around it, which no header can carry; ValueError if none is left."""
    if not (key := api_key.strip()):
        raise ValueError("api_key must not be empty")
    return key
