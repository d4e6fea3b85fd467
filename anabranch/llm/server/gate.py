"""What is looked at before a request is parsed: its host, its key and its size."""

from __future__ import annotations

import ipaddress
import re
import secrets
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from anabranch.llm.server.errors import ApiError

# paths that need no key: the page, what it is made of, and how the server is
OPEN = frozenset({"/", "/docs", "/openapi.json", "/health", "/version", "/metrics", "/stats"})
OPEN_FOLDER = "/page/"
MAX_VALUES = 1 << 19  # numbers and strings: tens of milliseconds
MAX_CONTAINERS = 1 << 15  # lists and objects
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


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
        try:
            self._check_host(headers)
            self._check_key(scope["path"], headers)
            self._check_length(headers)
        except ApiError as error:
            await error.response(scope, receive, send)
            return
        await self._app(scope, self._counted(receive), send)

    def _check_host(self, headers: Headers) -> None:
        host = headers.get("host")  # browsers send it always, HTTP/1.0 need not
        if self._hosts is not None and host is not None and not self._hosts.holds(host):
            raise ApiError(
                403,
                f"there is no host {host[:100]!r} here; if it should be, start the server with "
                "--allowed-host and its name",
                code="unknown_host",
            )

    def _check_key(self, path: str, headers: Headers) -> None:
        if self._api_key is None or path in OPEN or path.startswith(OPEN_FOLDER):
            return
        # Starlette reads headers as Latin-1, whatever bytes they hold
        kind, _, given = headers.get("authorization", "").partition(" ")
        same = secrets.compare_digest(given.strip().encode("latin-1"), self._api_key)
        if kind.lower() != "bearer" or not same:
            say = "the API key is wrong" if given else "there is no API key"
            raise ApiError(
                401,
                f"{say}: send the header 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _check_length(self, headers: Headers) -> None:
        length = headers.get("content-length", "")
        if length.isdigit() and int(length[:20]) > self._max_bytes:
            raise self._too_large()

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body exceeds {self._max_bytes} bytes; send less at once")

    def _counted(self, receive: Receive) -> Receive:
        """Count the bytes of a body that states no length, and the values of any body."""
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


def is_loopback(host: str) -> bool:
    """Whether an address to listen on is reached from this machine only."""
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


class HostNames:
    """Names under which a server answers: this machine's own, every address, and those given.

    A page of another origin can have its own name resolve to 127.0.0.1 (DNS rebinding); a browser
    then takes a server on this machine for that origin's. Such requests carry the page's name as
    their host. An address cannot be rebound.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        for name in names:
            if not name or any(mark in name for mark in "/:@ ") or isinstance(names, str):
                raise ValueError(
                    f"allowed_hosts must hold names like chat.example, without a port, got {name!r}"
                )
        self._names = {name.lower() for name in names} | {"localhost"}

    def holds(self, header: str) -> bool:
        """Whether the value of a Host header is one of them, with any port."""
        name = _without_port(header.strip()).lower().removesuffix(".")
        is_local = name in self._names or name.endswith(".localhost")
        return is_local or _address(name.strip("[]")) is not None


def _without_port(header: str) -> str:
    if header.startswith("["):
        return header.partition("]")[0] + "]"
    return header.partition(":")[0]


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def has_many_values(chunks: Sequence[bytes]) -> bool:
    """Whether a body, in the pieces in which it came, holds more than is parsed.

    Parsing and checking keep the interpreter to themselves: a million small lists, which a few MiB
    hold, take seconds, a text of the same size milliseconds.
    """
    if not _exceeds(chunks):
        return False
    return _exceeds([_STRING.sub(b"", b"".join(chunks))])  # commas and brackets of texts are none


def _exceeds(chunks: Sequence[bytes]) -> bool:
    num_values = sum(chunk.count(b",") for chunk in chunks)
    num_containers = sum(chunk.count(b"[") + chunk.count(b"{") for chunk in chunks)
    return num_values >= MAX_VALUES or num_containers > MAX_CONTAINERS
