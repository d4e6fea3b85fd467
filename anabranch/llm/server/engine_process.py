"""An engine in a process of its own, so that nothing done for HTTP delays a step."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from multiprocessing import Pipe
from queue import SimpleQueue
from typing import Any

from anabranch.llm.engine.async_llm import EngineDead
from anabranch.llm.engine.config import EngineConfig
from anabranch.llm.sampling.params import SamplingParams
from anabranch.llm.server.channel import Channel
from anabranch.llm.server.delta_listener import DeltaListener
from anabranch.llm.server.deltas import RequestDelta
from anabranch.llm.server.errors import RequestBroken, RequestRefused
from anabranch.llm.server.messages import (
    Abort,
    Add,
    Broken,
    Failed,
    Loading,
    Outputs,
    Ready,
    Refused,
    Snapshot,
)

Progress = Callable[[str, int, int], None]
STALL_SECONDS = 60.0  # without a message; the first step on a GPU may compile for long
EXIT_SECONDS = 10.0  # for the process to end after its socket is closed
log = logging.getLogger(__name__)


class EngineProcess:
    """Starts an engine, waits until it is ready, and streams what it reports of requests.

    `ended` is called with the reason, from another thread, if a process that was ready ends
    without having been closed.
    """

    num_restarts = 0

    def __init__(
        self,
        config: EngineConfig,
        progress: Progress | None = None,
        *,
        ended: Callable[[str], None] | None = None,
    ) -> None:
        self.error: str | None = None
        self._on_end = ended
        self._snapshot: Snapshot | None = None
        self._heard = time.monotonic()
        self._listeners: dict[str, DeltaListener] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._was_ready = self._closing = False
        self._start: SimpleQueue[Loading | Ready | None] = SimpleQueue()
        ours, theirs = Pipe()
        module = "anabranch.llm.server.engine_child"
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C is for the server, which drains
        )
        theirs.close()
        self._channel = Channel(ours, self._receive, self._ended)
        self._channel.send(config)
        self.info = self._wait_until_ready(progress)

    @property
    def pid(self) -> int:
        """Of the engine's process."""
        return self._process.pid

    @property
    def trouble(self) -> str | None:
        """Why no request can be answered now, if so."""
        if self.error is not None:
            return self.error
        silent = time.monotonic() - self._heard
        if silent > STALL_SECONDS:
            return f"the engine has sent nothing for {silent:.0f} seconds"
        return None

    @property
    def snapshot(self) -> Snapshot | None:
        """The newest counts; None when there is trouble, for they would be stale."""
        return None if self.trouble else self._snapshot

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

    def close(self) -> None:
        """End the process; open requests get EngineDead."""
        self._closing = True
        self.error = self.error or "the engine was closed"
        self._channel.close()
        try:
            self._process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _wait_until_ready(self, progress: Progress | None) -> Ready:
        while (message := self._start.get()) is not None:
            if isinstance(message, Ready):
                return message
            if progress:
                progress(*message)
        self.close()
        raise ValueError(f"the engine did not start: {self.error}")

    def _receive(self, message: Any) -> None:
        """From the channel's thread."""
        self._heard = time.monotonic()
        match message:
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
        """From the channel's thread, when the other side is gone."""
        if not self._closing:
            code = self._exit_code()
            self.error = self.error or f"the engine process ended with exit code {code}"
        self._start.put(None)
        self._in_loop(self._fail_all)
        if self._was_ready and not self._closing:
            log.error("%s", self.error)
            if self._on_end is not None:
                self._on_end(self.error or "")

    def _exit_code(self) -> int:
        try:
            return self._process.wait(EXIT_SECONDS / 5)
        except subprocess.TimeoutExpired:  # its socket is closed: it cannot be used any more
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
