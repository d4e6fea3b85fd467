"""uvicorn with deadlines for slow clients and an end that answers what is still open."""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.config import LOGGING_CONFIG

from anabranch.llm.server.guarded_protocol import GuardedProtocol, guarded_by
from anabranch.llm.server.service import Service

LAST_ANSWERS_SECONDS = 10.0  # after the drain, for clients to read that their request ends
log = logging.getLogger(__name__)


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
        """Listen, and say what is served where."""
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
    """uvicorn's, with ours beside it."""
    config = copy.deepcopy(LOGGING_CONFIG)
    config["loggers"]["anabranch"] = {
        "handlers": ["default"],
        "level": level.upper(),
        "propagate": False,
    }
    return config
