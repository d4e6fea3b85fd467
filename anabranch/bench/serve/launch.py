"""Our server as a process of its own, with the setting that a run asks for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import IO, Any, NamedTuple

from anabranch.bench.engine.bars import Progress
from anabranch.bench.serve.api import Api
from anabranch.bench.serve.http_client import parse_site
from anabranch.bench.serve.options import ServeOptions, Variant

START_SECONDS = 1800.0  # a large model is read, compiled and captured
STOP_SECONDS = 90.0
POLL_SECONDS = 0.2


class OwnServer(NamedTuple):
    """A process that answers at an address."""

    url: str
    pid: int


@contextmanager
def launched(variant: Variant, progress: Progress) -> Generator[str]:
    """The address of a server under one setting, for as long as it is needed."""
    progress(f"starting a server, {variant.name}", 0, 0)
    with running(server_settings(variant.options), variant.environment) as server:
        yield server.url


@contextmanager
def running(settings: dict[str, Any], environment: dict[str, str]) -> Generator[OwnServer]:
    """A server that answers; it is stopped afterwards, whatever happens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "anabranch.bench.serve.own_server",
             json.dumps(settings | {"port": port})],
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,  # an interrupt is ours to pass on
        )  # fmt: skip
        try:
            _wait_until_healthy(process, url, said)
            yield OwnServer(url, process.pid)
        finally:
            _stop(process)


def server_settings(options: ServeOptions) -> dict[str, Any]:
    """What `own_server` reads. Its limits refuse nothing that the run sends."""
    return {
        "engine": engine_settings(options),
        "max_queue": max(256, options.num_prompts),
        "max_seconds": options.timeout,
    }


def engine_settings(options: ServeOptions) -> dict[str, Any]:
    """As `EngineConfig` calls them: room for what is asked, unless the context was given."""
    engine = options.engine_config() | {"model": options.launch}
    engine["max_model_len"] = options.max_model_len or options.longest
    if options.max_num_seqs is not None:
        engine["max_num_seqs"] = options.max_num_seqs
    return engine


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, said: IO[bytes]) -> None:
    api = Api(parse_site(url), timeout=5.0)
    end = time.monotonic() + START_SECONDS
    while asyncio.run(api.get("/health")) is None:
        if process.poll() is not None:
            raise ValueError(f"the server ended with {process.returncode}: {_last_line(said)}")
        if time.monotonic() > end:
            raise ValueError(f"the server is not ready after {START_SECONDS:g} s")
        time.sleep(POLL_SECONDS)


def _last_line(said: IO[bytes]) -> str:
    said.seek(0)
    lines = said.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    with contextlib.suppress(ProcessLookupError):  # whoever of its group is left
        os.killpg(process.pid, signal.SIGKILL)
