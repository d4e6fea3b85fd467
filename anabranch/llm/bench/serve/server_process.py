"""`anabranch serve` as a process of its own, for the length of a benchmark."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import IO, NamedTuple

import httpx

from anabranch.llm.cli.engine_options import ServingOptions
from anabranch.llm.cli.options import arguments_of

START_SECONDS = 1800.0  # a large model is read, compiled and captured
STOP_SECONDS = 90.0
POLL_SECONDS = 0.2
QUEUE = 100_000  # no request is refused


class LaunchedServer(NamedTuple):
    """A process that answers at an address."""

    url: str
    pid: int


@contextmanager
def launched(model: str, options: ServingOptions, timeout: float) -> Generator[LaunchedServer]:
    """A healthy server; it is stopped afterwards, whatever happens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "anabranch", *serve_arguments(model, options, timeout),
             "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # an interrupt is ours to pass on
        )  # fmt: skip
        try:
            _wait_until_healthy(process, url, log)
            yield LaunchedServer(url, process.pid)
        finally:
            _stop(process)


def serve_arguments(model: str, options: ServingOptions, timeout: float) -> list[str]:
    """The command line of a server with these options, whose limits refuse nothing."""
    engine = arguments_of(ServingOptions, options, without=("model",))
    limits = ["--max-queue", str(QUEUE), "--max-request-seconds", str(timeout)]
    return ["serve", model, *engine, *limits, "--log-level", "warning"]


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: IO[bytes]) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        with suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=5.0, trust_env=False).status_code == 200:
                return
        if process.poll() is not None:
            log.seek(0)
            lines = log.read().decode(errors="replace").strip().splitlines()
            reason = lines[-1] if lines else "it printed nothing"
            raise ValueError(f"the server ended with {process.returncode}: {reason}")
        time.sleep(POLL_SECONDS)
    raise ValueError(f"the server is not ready after {START_SECONDS:g} s")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    with suppress(ProcessLookupError):  # the rest of its group
        os.killpg(process.pid, signal.SIGKILL)
