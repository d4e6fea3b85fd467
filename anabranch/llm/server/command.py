"""`anabranch serve`: an engine, a service and an HTTP server around them."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from anabranch.llm.engine.config import EngineConfig
from anabranch.llm.server.app import make_app
from anabranch.llm.server.engine_process import Progress
from anabranch.llm.server.engine_watch import HangPolicy
from anabranch.llm.server.gate import HostNames, checked_key, is_loopback
from anabranch.llm.server.http_server import HttpServer
from anabranch.llm.server.restarting_engine import RestartingEngine, RestartPolicy
from anabranch.llm.server.server_limits import ServerLimits
from anabranch.llm.server.service import make_service

DRAIN_SECONDS = 60
ENGINE_FAILED_EXIT_CODE = 3
MMAP_THRESHOLD = -3  # of mallopt(3)
MMAP_BYTES = 256 << 10
BESIDE_CONNECTIONS = 256  # files of the page, of the engine, of libraries
log = logging.getLogger(__name__)


def serve(
    config: EngineConfig,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    model_name: str | None = None,
    limits: ServerLimits | None = None,
    cors_origins: Sequence[str] = (),
    allowed_hosts: Sequence[str] = (),
    max_engine_restarts: int = 3,
    max_step_seconds: float = 600.0,
    drain_seconds: float = DRAIN_SECONDS,
    log_level: str = "info",
    progress: AbstractContextManager[Progress | None] | None = None,
    tool_format: str = "auto",
    reasoning: bool = True,
) -> None:
    """Serve a model until SIGTERM or SIGINT; open requests are answered first.

    `model_name` is what clients call the model, its own name by default. Requests that are open
    `drain_seconds` after the signal end with an error. An engine that fails, hangs, or takes more
    than `max_step_seconds` for a step is started again, at most `max_engine_restarts` times in ten
    minutes; then the process exits with code 3.
    `progress` is open while the engine starts. `tool_format` is how the model writes calls of
    tools; with `reasoning`, it is separated from the text of answers.

    On an address of this machine only, requests must name it or one of `allowed_hosts`; on others
    they must only where `allowed_hosts` are given. "*" stands for any host.
    """
    api_key = None if api_key is None else checked_key(api_key)
    limits = limits or ServerLimits()
    any_host = "*" in allowed_hosts or not (allowed_hosts or is_loopback(host))
    hosts = None if any_host else HostNames(allowed_hosts)
    if not drain_seconds >= 0:
        raise ValueError(f"drain_seconds must be at least 0, got {drain_seconds}")
    policy = RestartPolicy(max_restarts=max_engine_restarts)
    hangs = HangPolicy(step_seconds=max_step_seconds)
    check_address(host, port)
    return_large_blocks()
    make_room_for(limits.max_connections)
    # uvicorn raises a signal again when it has drained; this lets the engine be closed, too
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    with progress or nullcontext() as advance:
        engine = RestartingEngine(config, advance, policy=policy, hangs=hangs)
    try:
        service = make_service(
            engine,
            limits=limits,
            model_name=model_name,
            created=int(time.time()),
            tool_format=tool_format,
            reasoning=reasoning,
        )
        app = make_app(service, api_key=api_key, cors_origins=cors_origins, hosts=hosts)
        HttpServer(
            app,
            service,
            host=host,
            port=port,
            drain_seconds=drain_seconds,
            log_level=log_level,
            stops=lambda: engine.given_up,
        ).run()
    finally:
        engine.close()
    if engine.given_up:
        sys.exit(ENGINE_FAILED_EXIT_CODE)


def check_address(host: str, port: int) -> None:
    """Refuse an address that cannot be listened on, before a model is loaded for it."""
    if not 0 <= port <= 65535:
        raise ValueError(f"port must be from 0 to 65535, got {port}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise ValueError(f"cannot listen on {host}:{port}: {error.strerror}") from error


def return_large_blocks() -> None:
    """Fix the size from which glibc maps a block by itself, so that memory goes back when freed.

    By default glibc raises it to the size of what was freed, up to 32 MiB. Later blocks of that
    size then come from heaps, where one small block on top keeps all of them.
    """
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError, OSError):  # another C library
            ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, MMAP_BYTES)


def make_room_for(num_connections: int) -> None:
    """Raise the limit of open files, as far as the system lets it; warn if that is not enough."""
    if sys.platform == "win32":
        return
    import resource

    wanted = num_connections + BESIDE_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        log.warning(
            "%d connections may need %d open files, and the system allows %d",
            num_connections,
            wanted,
            allowed,
        )
