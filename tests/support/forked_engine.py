"""Engines' processes forked from one that has imported what they run: each starts seconds sooner.

The servers of `test_server_failure` and of `test_bench_serve` start theirs as users' servers do.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any
from unittest import mock

from anabranch.llm.engine.config import EngineConfig
from anabranch.llm.server import engine_process
from anabranch.llm.server.engine_process import EngineProcess

CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = [
    "torch.distributed",
    "anabranch.llm.engine.llm",
    "anabranch.llm.models.checkpoint",
    "anabranch.llm.models.replaced_parts",
    "anabranch.llm.server.engine_child",
]


class ForkedProcess:
    """As much of `subprocess.Popen` as an `EngineProcess` asks for."""

    def __init__(self, command: Sequence[str], *, pass_fds: list[int], start_new_session: bool):
        assert command[1:] == ["-m", "anabranch.llm.server.engine_child", str(pass_fds[0])]
        assert start_new_session
        CONTEXT.set_forkserver_preload(PRELOADED)
        theirs: Any = Connection(os.dup(pass_fds[0]))
        self._process = CONTEXT.Process(target=_serve, args=(theirs,))
        self._process.start()
        theirs.close()
        self._waits = threading.Lock()

    @property
    def pid(self) -> int:
        assert self._process.pid
        return self._process.pid

    def wait(self, timeout: float | None = None) -> int:
        with self._waits:
            self._process.join(timeout)
            code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("the engine", timeout or 0.0)
        return code

    def kill(self) -> None:
        self._process.kill()


def _serve(connection: Any) -> None:
    from anabranch.llm.server.engine_child import main

    os.setsid()
    os._exit(main(connection.fileno()))


@contextmanager
def engines_forked() -> Iterator[None]:
    replaced = SimpleNamespace(Popen=ForkedProcess, TimeoutExpired=subprocess.TimeoutExpired)
    with mock.patch.object(engine_process, "subprocess", replaced):
        yield


def forked_engine(config: EngineConfig) -> EngineProcess:
    with engines_forked():
        return EngineProcess(config)
