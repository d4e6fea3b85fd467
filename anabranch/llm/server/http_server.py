"""uvicorn with deadlines for slow clients and an end that answers what is still open.

uvicorn ends connections that are idle between requests; half a request or an answer that nobody
reads would stay for ever. There are only so many: a new one takes the place of the one that has
waited longest for its request to be complete, so that those who send nothing shut nobody out.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import socket
from collections.abc import Callable
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.config import LOGGING_CONFIG
from uvicorn.protocols.http.h11_impl import H11Protocol

from anabranch.llm.server.errors import ApiError, ServerClosing, as_api_error
from anabranch.llm.server.server_limits import ServerLimits
from anabranch.llm.server.service import Service

LAST_ANSWERS_SECONDS = 10.0  # after the drain, for clients to read that their request ends
log = logging.getLogger(__name__)


class GuardedProtocol(H11Protocol):
    """A connection with deadlines for headers, for a body, and for a client to read."""

    limits = ServerLimits()  # set by `guarded_by`
    _reading: tuple[Any, Any] | None = None  # what is being read, and the request before it
    _waiting_since: float | None = None  # of the loop's clock; None while a request is answered
    _deadline: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._watch()
        if len(self.connections) > self.limits.max_connections:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        """Bytes of a request do not move its deadline."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._deadline, self._unread):
            if timer is not None:
                timer.cancel()

    def pause_writing(self) -> None:
        """The client reads more slowly than it is written to."""
        super().pause_writing()
        self._unread = self.loop.call_later(self.limits.max_request_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def end_reading(self) -> None:
        """End a connection whose request is not complete, because the server closes."""
        if self.conn.their_state is h11.SEND_BODY:
            self._end(as_api_error(ServerClosing()))

    def _watch(self) -> None:
        times: dict[Any, float] = {
            h11.IDLE: self.limits.header_seconds,
            h11.SEND_BODY: self.limits.body_seconds,
        }
        seconds = times.get(self.conn.their_state)
        reading = None if seconds is None else (self.conn.their_state, self.cycle)
        if reading == self._reading:
            return
        self._reading = reading
        self._waiting_since = None if reading is None else self.loop.time()
        if self._deadline is not None:
            self._deadline.cancel()
        if seconds is not None:
            self._deadline = self.loop.call_later(seconds, self._expire)

    def _make_room(self) -> None:
        connections: list[Any] = list(self.connections)
        waiting = [
            (each._waiting_since, place, each)
            for place, each in enumerate(connections)
            if isinstance(each, GuardedProtocol)
            and each._waiting_since is not None
            and not each.transport.is_closing()
        ]
        longest = min(waiting)[-1]  # perhaps this one, which is the newest
        most = self.limits.max_connections
        message = f"the server has {most} connections, as many as it takes; try again in 1 s"
        error = ApiError(503, message, code="too_many_connections", headers={"Retry-After": "1"})
        longest._end(error, to_anyone=longest is self)

    def _expire(self) -> None:
        headers = self.conn.their_state is h11.IDLE
        part = "headers" if headers else "body"
        seconds = self.limits.header_seconds if headers else self.limits.body_seconds
        message = f"the {part} of the request did not arrive within {seconds:g} s"
        self._end(ApiError(408, message, code="slow_request"))

    def _end(self, error: ApiError, *, to_anyone: bool = False) -> None:
        """Answer a request that has begun, or any client if `to_anyone`; close the connection."""
        if self.transport.is_closing():
            return
        came = self.conn.our_state is not h11.IDLE or bool(self.conn.trailing_data[0])
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and (came or to_anyone):
            self._send(error)
        if self.cycle is not None:  # pyright: ignore[reportUnnecessaryComparison]
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def _send(self, error: ApiError) -> None:
        body = error.body.encode()
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            **(error.headers or {}),
        }
        response = h11.Response(status_code=error.status_code, headers=list(headers.items()))
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")


def guarded_by(limits: ServerLimits) -> type[GuardedProtocol]:
    return type("GuardedProtocol", (GuardedProtocol,), {"limits": limits})


class HttpServer(uvicorn.Server):
    """Serves an app until a signal comes or `stops` is true.

    Requests that are still open `drain_seconds` after that get an error.
    """

    def __init__(
        self,
        app: FastAPI,
        service: Service,
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
        drain_seconds: float = 60.0,
        log_level: str = "info",
        stops: Callable[[], bool] | None = None,
    ) -> None:
        config = uvicorn.Config(
            app,
            host=host,
            port=port,
            http=guarded_by(service.limits),
            ws="none",
            lifespan="off",
            log_config=_log_config(log_level),
            log_level=log_level,
            access_log=False,
            timeout_graceful_shutdown=math.ceil(drain_seconds + LAST_ANSWERS_SECONDS),
        )
        super().__init__(config)
        self._service = service
        self._drain_seconds = drain_seconds
        self._stops = stops

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.started:
            return
        info = self._service.engine.info
        log.info(
            "%s on %s, a cache of %d tokens, a context of %d",
            self._service.model_name,
            info.device,
            info.cache_tokens,
            info.max_model_len,
        )
        for server in self.servers:
            for listener in server.sockets:
                log.info("page to chat on: %s/", url_of(listener))

    async def on_tick(self, counter: int) -> bool:
        """Whether to stop; asked ten times a second."""
        return await super().on_tick(counter) or (self._stops is not None and self._stops())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer what is open, for as long as it may take."""
        timer = asyncio.get_running_loop().call_later(self._drain_seconds, self._end_all)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    def _end_all(self) -> None:
        self._service.open_requests.end_all()
        connections: list[Any] = list(self.server_state.connections)
        for connection in connections:
            if isinstance(connection, GuardedProtocol):
                connection.end_reading()


def url_of(listener: socket.socket) -> str:
    """Where a browser on this machine finds a listening socket."""
    bound, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bound) or str(bound)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _log_config(level: str) -> dict[str, Any]:
    """uvicorn's logging, and our logger."""
    config = copy.deepcopy(LOGGING_CONFIG)
    config["loggers"]["anabranch"] = {
        "handlers": ["default"],
        "level": level.upper(),
        "propagate": False,
    }
    return config
