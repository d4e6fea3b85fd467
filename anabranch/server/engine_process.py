"""An engine in a process of its own, so that nothing done for HTTP delays a step."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from multiprocessing import Pipe
from queue import SimpleQueue
from typing import Any

from anabranch.engine.async_llm import EngineDead
from anabranch.engine.config import EngineConfig
from anabranch.engine.sampling_params import SamplingParams
from anabranch.server.channel import Channel
from anabranch.server.deltas import RequestDelta, unpack
from anabranch.server.errors import RequestRefused
from anabranch.server.messages import (
    Abort,
    Add,
    Failed,
    Loading,
    Outputs,
    Ready,
    Refused,
    Snapshot,
)

Progress = Callable[[str, int, int], None]
STALL_SECONDS = 60.0  # without a sign of life; the first step on a GPU may compile for long
EXIT_SECONDS = 10.0  # for the process to end once it is told to


class _Listener:
    """What was said of some requests and not read yet; of the event loop's thread alone."""

    def __init__(self, request_ids: Sequence[str]) -> None:
        self.open = set(request_ids)
        self._unread: dict[str, RequestDelta] = {}
        self._error: Exception | None = None
        self._ready = asyncio.Event()

    def tell(self, delta: RequestDelta) -> None:
        """A reader that is slow gets several deltas as one."""
        before = self._unread.get(delta.request_id)
        self._unread[delta.request_id] = before.join(delta) if before else delta
        self._ready.set()

    def fail(self, error: Exception) -> None:
        """No delta follows."""
        self._error = error
        self._ready.set()

    async def next(self) -> list[RequestDelta]:
        """All that is unread."""
        await self._ready.wait()
        self._ready.clear()
        if self._error is not None:
            raise self._error
        unread, self._unread = self._unread, {}
        return list(unread.values())


class EngineProcess:
    """Starts an engine and streams what it says of requests."""

    def __init__(self, config: EngineConfig, progress: Progress | None = None) -> None:
        self.error: str | None = None
        self.snapshot: Snapshot | None = None
        self._heard = time.monotonic()
        self._listeners: dict[str, _Listener] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._gone = threading.Event()
        self._start: SimpleQueue[Loading | Ready | None] = SimpleQueue()
        ours, theirs = Pipe()
        module = "anabranch.server.engine_child"
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
            return f"the engine has said nothing for {silent:.0f} seconds"
        return None

    async def generate(
        self, prompts: Mapping[str, list[int]], params: SamplingParams
    ) -> AsyncGenerator[RequestDelta]:
        """What is new of requests, by id, until all are finished; closing it aborts them.

        Raises RequestRefused for what the engine does not run, and EngineDead if it fails.
        """
        if self.error is not None:
            raise EngineDead(self.error)
        self._loop = asyncio.get_running_loop()
        listener = _Listener(list(prompts))
        for request_id, prompt in prompts.items():
            self._listeners[request_id] = listener
            self._channel.send(Add(request_id, prompt, params))
        try:
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
        raise ValueError(f"the engine did not start: {self.error}")

    def _receive(self, message: Any) -> None:
        """From the channel's thread."""
        self._heard = time.monotonic()
        match message:
            case Snapshot():
                self.snapshot = message
            case Loading() | Ready():
                self._start.put(message)
            case Failed(reason, trace):
                sys.stderr.write(trace)
                self.error = f"the engine failed: {reason}" if trace else reason
            case _:
                self._in_loop(self._dispatch, message)

    def _ended(self) -> None:
        """From the channel's thread, when the other side is gone."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_SECONDS / 5)
        code = self._process.returncode
        self.error = self.error or f"the engine process ended with exit code {code}"
        self._start.put(None)
        self._in_loop(self._fail_all)

    def _in_loop(self, call: Callable[..., None], *arguments: Any) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
                self._loop.call_soon_threadsafe(call, *arguments)

    def _dispatch(self, message: Outputs | Refused) -> None:
        if isinstance(message, Refused):
            listener = self._listeners.pop(message.request_id, None)
            if listener is not None:
                listener.open.discard(message.request_id)
                listener.fail(RequestRefused(message.reason))
            return
        for delta in unpack(message.packed):
            listener = self._listeners.get(delta.request_id)
            if listener is None:
                continue
            listener.tell(delta)
            if delta.finished:
                del self._listeners[delta.request_id]

    def _fail_all(self) -> None:
        for listener in self._listeners.values():
            listener.fail(EngineDead(self.error))
        self._listeners.clear()
