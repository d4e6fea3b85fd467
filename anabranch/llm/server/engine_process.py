"""An engine in a process of its own, so that nothing done for HTTP delays a step."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from multiprocessing import Pipe
from queue import SimpleQueue
from typing import Any

from anabranch.llm.engine.async_llm import EngineDead
from anabranch.llm.engine.config import EngineConfig
from anabranch.llm.sampling.params import SamplingParams
from anabranch.llm.server.deltas import DeltaListener, RequestDelta
from anabranch.llm.server.engine_watch import EngineWatch, HangPolicy
from anabranch.llm.server.errors import RequestBroken, RequestRefused
from anabranch.llm.server.messages import (
    Abort,
    Add,
    Beat,
    Broken,
    Channel,
    Failed,
    Loading,
    Outputs,
    Ready,
    Refused,
    Snapshot,
)

Progress = Callable[[str, int, int], None]
WATCH_SECONDS = 0.5  # between two looks at whether the engine hangs
EXIT_SECONDS = 10.0  # for the process to end after its socket is closed
log = logging.getLogger(__name__)


class EngineProcess:
    """Starts an engine, waits until it is ready, and streams what it reports of requests.

    A process that hangs is killed, which then counts as its end.
    """

    num_restarts = 0

    def __init__(
        self,
        config: EngineConfig,
        progress: Progress | None = None,
        *,
        hangs: HangPolicy | None = None,
    ) -> None:
        self.error: str | None = None
        self._snapshot: Snapshot | None = None
        self._watch = EngineWatch(hangs or HangPolicy())
        self._over = threading.Event()
        self._closes = threading.Lock()
        self._listeners: dict[str, DeltaListener] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._was_ready = self._closing = False
        self._start: SimpleQueue[Loading | Ready | None] = SimpleQueue()
        ours, theirs = Pipe()
        module = "anabranch.llm.server.engine_child"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the server, which drains
            )
        self._channel = Channel(ours, self._receive, self._ended)
        self._watcher = threading.Thread(target=self._look, name="engine-watch", daemon=True)
        self._watcher.start()
        self._channel.send(config)
        self.info = self._wait_until_ready(progress)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def trouble(self) -> str | None:
        """Why no request can be answered now, if so."""
        return self.error

    @property
    def snapshot(self) -> Snapshot | None:
        """The newest counts; None when there is trouble, for they would be stale."""
        return None if self.error else self._snapshot

    async def generate(
        self, prompts: Mapping[str, list[int]], params: SamplingParams
    ) -> AsyncGenerator[RequestDelta]:
        """What is new of requests, by id, until all are finished; closing it aborts them.

        Raises RequestRefused for what the engine does not run, RequestBroken if it fails at one of
        these requests, and EngineDead if it ends.
        """
        self._loop = asyncio.get_running_loop()
        listener = DeltaListener(prompts)
        self._listeners |= dict.fromkeys(prompts, listener)
        try:
            # looked at after listening has begun: `_ended` sets it first, then fails listeners
            if self.error is not None:
                raise EngineDead(self.error)
            for request_id, prompt in prompts.items():
                self._channel.send(Add(request_id, prompt, params))
            while listener.open:
                for delta in await listener.next():
                    if delta.finished:
                        listener.open.discard(delta.request_id)
                    yield delta
        finally:
            for request_id in listener.open:
                self._listeners.pop(request_id, None)
                self._channel.send(Abort(request_id))

    def wait_until_ended(self) -> str:
        """Why the process has ended, once it has, by itself or by `close`."""
        self._over.wait()
        return self.error or ""

    def close(self) -> None:
        """End the process and free all that it holds; open requests get EngineDead."""
        self._closing = True
        self.error = self.error or "the engine was closed"
        with self._closes:
            self._channel.close()
            self._watcher.join()
            self._wait_or_kill(EXIT_SECONDS)

    def _wait_until_ready(self, progress: Progress | None) -> Ready:
        while (message := self._start.get()) is not None:
            if isinstance(message, Ready):
                return message
            if progress:
                progress(*message)
        self.close()
        raise ValueError(f"the engine did not start: {self.error}")

    def _receive(self, message: Any) -> None:
        """Called by the channel's thread."""
        self._watch.hear(message)
        match message:
            case Beat():
                pass
            case Snapshot():
                self._snapshot = message
            case Loading():
                self._start.put(message)
            case Ready():
                self._was_ready = True
                self._start.put(message)
            case Failed(reason, trace):
                sys.stderr.write(trace)
                self.error = f"the engine failed: {reason}" if trace else reason
            case _:
                self._in_loop(self._dispatch, message)

    def _ended(self) -> None:
        """Called by the channel's thread when the other side is gone."""
        try:
            if not self._closing:
                code = self._wait_or_kill(EXIT_SECONDS / 5)
                self.error = self.error or f"the engine process ended with exit code {code}"
            self._in_loop(self._fail_all)
            if self._was_ready and not self._closing:
                log.error("%s", self.error)
        finally:
            self._start.put(None)
            self._over.set()

    def _look(self) -> None:
        """Runs in a thread until the process ends; killing it also closes its socket."""
        while not self._over.wait(WATCH_SECONDS):
            if (reason := self._watch.pass_time(WATCH_SECONDS)) is not None:
                self.error = self.error or reason
                self._process.kill()
                return

    def _wait_or_kill(self, seconds: float) -> int:
        """The exit code of a process whose socket is closed: it cannot be used any more."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _in_loop(self, call: Callable[..., None], *arguments: Any) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
                self._loop.call_soon_threadsafe(call, *arguments)

    def _dispatch(self, message: Outputs | Refused | Broken) -> None:
        match message:
            case Outputs(deltas):
                for delta in deltas:
                    self._put(delta)
            case Refused(request_id, reason):
                self._fail(request_id, RequestRefused(reason))
            case Broken(request_id, reason):
                self._fail(request_id, RequestBroken(reason))

    def _put(self, delta: RequestDelta) -> None:
        listener = self._listeners.get(delta.request_id)
        if listener is None:
            return
        listener.put(delta)
        if delta.finished:
            del self._listeners[delta.request_id]

    def _fail(self, request_id: str, error: Exception) -> None:
        listener = self._listeners.pop(request_id, None)
        if listener is not None:
            listener.open.discard(request_id)
            listener.fail(error)

    def _fail_all(self) -> None:
        for listener in self._listeners.values():
            listener.fail(EngineDead(self.error))
        self._listeners.clear()
