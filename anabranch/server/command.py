"""`anabranch serve`: an engine, a service and uvicorn around them."""

from __future__ import annotations

import signal
import socket
import sys
import time
from contextlib import AbstractContextManager, nullcontext

import uvicorn

from anabranch.engine.config import EngineConfig
from anabranch.server.app import make_app
from anabranch.server.engine_process import EngineProcess, Progress
from anabranch.server.limits import ServerLimits
from anabranch.server.service import make_service

DRAIN_SECONDS = 60


def serve(
    config: EngineConfig,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    model_name: str | None = None,
    limits: ServerLimits | None = None,
    drain_seconds: int = DRAIN_SECONDS,
    log_level: str = "info",
    progress: AbstractContextManager[Progress | None] | None = None,
) -> None:
    """Serve a model until SIGTERM or SIGINT; open requests are answered first.

    `model_name` is what clients call the model, its own name by default. Requests that are open
    `drain_seconds` after the signal are given up. `progress` is open while the engine starts.
    """
    if api_key is not None and not api_key.strip():
        raise ValueError("api_key must not be empty")
    check_address(host, port)
    # uvicorn raises a signal again when it has drained; this lets the engine be closed, too
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    with progress or nullcontext() as advance:
        engine = EngineProcess(config, advance)
    try:
        service = make_service(
            engine,
            limits=limits or ServerLimits(),
            model_name=model_name,
            created=int(time.time()),
        )
        uvicorn.run(
            make_app(service, api_key=api_key),
            host=host,
            port=port,
            log_level=log_level,
            access_log=False,
            timeout_graceful_shutdown=drain_seconds,
        )
    finally:
        engine.close()


def check_address(host: str, port: int) -> None:
    """Refuse an address that cannot be listened on, before a model is loaded for it."""
    if not 0 <= port <= 65535:
        raise ValueError(f"port must be from 0 to 65535, got {port}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise ValueError(f"cannot listen on {host}:{port}: {error.strerror}") from error
