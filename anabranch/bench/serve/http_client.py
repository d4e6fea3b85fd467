"""HTTP/1.1 over asyncio, a connection for each request: little stands between a token and us."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import NamedTuple
from urllib.parse import urlsplit

READ_BYTES = 1 << 16
CUT_SHORT = "the server closed the connection before its answer ended"


class Site(NamedTuple):
    """Where requests go, and the headers that all of them have."""

    host: str
    port: int
    secure: bool
    root: str  # of every path
    headers: Mapping[str, str]


def parse_site(base_url: str, api_key: str | None = None) -> Site:
    """From http://HOST:PORT, with or without /v1."""
    parts = urlsplit(base_url)
    try:
        port = parts.port
    except ValueError:
        raise ValueError(f"--base-url has no valid port: {base_url!r}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"--base-url must be like http://127.0.0.1:8000, got {base_url!r}")
    secure = parts.scheme == "https"
    root = parts.path.rstrip("/").removesuffix("/v1")
    headers = {"Host": parts.netloc.rpartition("@")[2], "Accept": "*/*", "Connection": "close"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    return Site(parts.hostname, port or (443 if secure else 80), secure, root, headers)


class Response:
    """A status, headers with small letters, and a body that is still arriving."""

    def __init__(
        self, reader: asyncio.StreamReader, status: int, headers: Mapping[str, str]
    ) -> None:
        self.status = status
        self.headers = headers
        self._reader = reader

    async def read(self) -> bytes:
        """The whole body."""
        return b"".join([piece async for piece in self.pieces()])

    async def pieces(self) -> AsyncGenerator[bytes]:
        """The body as it arrives."""
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            while size := int((await _line(self._reader)).split(b";")[0], 16):
                async for piece in self._exactly(size):
                    yield piece
                await _line(self._reader)
            while await _line(self._reader):  # trailers
                pass
        elif "content-length" in self.headers:
            async for piece in self._exactly(int(self.headers["content-length"])):
                yield piece
        else:
            while piece := await self._reader.read(READ_BYTES):
                yield piece

    async def _exactly(self, size: int) -> AsyncGenerator[bytes]:
        while size:
            piece = await self._reader.read(min(size, READ_BYTES))
            if not piece:
                raise ConnectionError(CUT_SHORT)
            size -= len(piece)
            yield piece


@asynccontextmanager
async def open_response(
    site: Site, method: str, path: str, body: bytes | None = None
) -> AsyncGenerator[Response]:
    """Send a request; its status and headers have arrived."""
    reader, writer = await asyncio.open_connection(site.host, site.port, ssl=site.secure or None)
    try:
        writer.write(_head(site, method, path, body) + (body or b""))
        await writer.drain()
        yield await read_response(reader)
    finally:
        writer.close()


def _head(site: Site, method: str, path: str, body: bytes | None) -> bytes:
    headers = dict(site.headers)
    if body is not None:
        headers |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
    lines = [f"{method} {site.root}{path} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


async def read_response(reader: asyncio.StreamReader) -> Response:
    """The status and the headers, behind any that are only provisional."""
    while True:
        first = (await _line(reader)).split(maxsplit=2)
        if len(first) < 2 or not first[0].startswith(b"HTTP/") or not first[1].isdigit():
            raise ConnectionError("the server does not speak HTTP")
        headers: dict[str, str] = {}
        while line := await _line(reader):
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.strip().lower()] = value.strip()
        if int(first[1]) >= 200:
            return Response(reader, int(first[1]), headers)


async def _line(reader: asyncio.StreamReader) -> bytes:
    line = await reader.readline()
    if not line.endswith(b"\n"):
        raise ConnectionError(CUT_SHORT)
    return line.rstrip(b"\r\n")
