"""The engine's process: requests in, deltas out, a step at a time.

Run by `EngineProcess` with the number of a socket. It ends when the other side closes it.
"""

from __future__ import annotations

import copy
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch

from anabranch.llm.engine.engine import Engine
from anabranch.llm.grammar.grammar_compiler import CompiledGrammar
from anabranch.llm.sampling.params import SamplingParams
from anabranch.llm.server.deltas import DeltaCursor, RequestDelta
from anabranch.llm.server.engine_watch import Heartbeat
from anabranch.llm.server.messages import (
    Abort,
    Add,
    Broken,
    Channel,
    Failed,
    Loading,
    Outputs,
    Ready,
    Refused,
    Snapshot,
)

SNAPSHOT_SECONDS = 0.2  # while working
CAUSED_BY_SETTINGS = (ValueError, OSError, ImportError, MemoryError, torch.OutOfMemoryError)
IDLE_SECONDS = 1.0  # at most between two messages when there is nothing to do
LAST_WORDS_SECONDS = 5.0  # for the server to read why the engine fails
LARGE_CHARS = 8192
MAX_WAITING = 128
NUM_SMALL_THREADS = 2


class EngineLoop:
    """Steps for as long as there is work, and reports what is new.

    An error while one request is added or reported ends that request and no other.
    """

    def __init__(
        self, engine: Engine, channel: Channel, inbox: SimpleQueue[Any], heart: Heartbeat
    ) -> None:
        self._engine, self._channel, self._inbox, self._heart = engine, channel, inbox, heart
        self._cursors: dict[str, DeltaCursor] = {}
        self._grammars = GrammarThreads(engine, inbox.put)
        self._reported = 0.0
        self._was_busy = False

    def run(self) -> None:
        self._engine.admission.grammars.prepare()  # while no stream waits for its next token
        while True:
            self._take_messages()
            with self._heart.step():
                self._engine.ranks.check()
                if self._engine.has_work:
                    self._step()
            self._report()

    def _take_messages(self) -> None:
        try:
            if not self._engine.has_work:
                self._obey(self._inbox.get(timeout=IDLE_SECONDS))
            while True:
                self._obey(self._inbox.get_nowait())
        except Empty:
            pass

    def _obey(self, message: Add | Abort | Compiled) -> None:
        if isinstance(message, Abort):
            self._grammars.take(message.request_id)
            self._cursors.pop(message.request_id, None)
            self._engine.abort(message.request_id)
        elif isinstance(message, Compiled):
            if self._grammars.take(message.add.request_id):  # not aborted meanwhile
                self._add(message.add, message)
        else:
            self._add(message, None)

    def _add(self, message: Add, compiled: Compiled | None) -> None:
        try:
            if compiled is None and message.params.structured_outputs is not None:
                self._grammars.submit(message)
                return
            if compiled is not None and compiled.error is not None:
                raise compiled.error
            grammar = compiled.grammar if compiled is not None else None
            request = self._engine.add_request(*message, grammar)
            self._cursors[message.request_id] = DeltaCursor(request)
        except ValueError as error:
            self._channel.send(Refused(message.request_id, str(error)))
        except Exception as error:
            self._give_up(message.request_id, error)

    def _step(self) -> None:
        deltas: list[RequestDelta] = []
        for request in self._engine.step():
            if any(seq.finish_reason == "error" for seq in request.seqs):
                self._cursors.pop(request.request_id, None)
                self._channel.send(Broken(request.request_id, request.error or ""))
                continue
            try:
                delta = self._cursors[request.request_id].delta()
                deltas += [] if delta is None else [delta]
            except Exception as error:
                self._give_up(request.request_id, error)
        for delta in deltas:
            if delta.finished:
                del self._cursors[delta.request_id]
        if deltas:
            self._channel.send(Outputs(deltas))

    def _give_up(self, request_id: str, error: Exception) -> None:
        traceback.print_exception(error, file=sys.stderr)
        self._cursors.pop(request_id, None)
        self._engine.abort(request_id)
        self._channel.send(Broken(request_id, f"{type(error).__name__}: {error}"))

    def _report(self) -> None:
        """Send counts at intervals, and whenever the work ends."""
        busy, now = self._engine.has_work, time.monotonic()
        ended, self._was_busy = self._was_busy and not busy, busy
        if not ended and now - self._reported < (SNAPSHOT_SECONDS if busy else IDLE_SECONDS / 2):
            return
        self._reported = now
        self._channel.send(snapshot(self._engine))


class Compiled(NamedTuple):
    """A request whose grammar is ready, or why it is not."""

    add: Add
    grammar: CompiledGrammar | None
    error: Exception | None


class GrammarThreads:
    """Compiles grammars of requests, and hands them back through `done`, from a thread.

    Large ones share a thread; small ones do not wait for them. These threads run Python, so their
    priority is that of steps.
    """

    def __init__(self, engine: Engine, done: Callable[[Compiled], None]) -> None:
        self._engine, self._done = engine, done
        self._small = ThreadPoolExecutor(NUM_SMALL_THREADS, "grammar")
        self._large = ThreadPoolExecutor(1, "large-grammar")
        self._waiting: dict[str, Future[None]] = {}

    def submit(self, add: Add) -> None:
        """Compile the grammar of a request; ValueError where too many wait."""
        if len(self._waiting) >= MAX_WAITING:
            raise ValueError("too many grammars wait to be compiled; try again")
        wanted = add.params.structured_outputs
        large = wanted is not None and len(wanted.text) > LARGE_CHARS
        pool = self._large if large else self._small
        self._waiting[add.request_id] = pool.submit(self._compile, add, add.params)

    def take(self, request_id: str) -> bool:
        """Stop waiting for the grammar of a request; whether it was waiting."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            waiting.cancel()
        return waiting is not None

    def _compile(self, add: Add, params: SamplingParams) -> None:
        try:
            self._done(Compiled(add, self._engine.compile_grammar(params), None))
        except Exception as error:  # of this request alone
            self._done(Compiled(add, None, error))


def snapshot(engine: Engine) -> Snapshot:
    stats = copy.deepcopy(engine.stats)
    return Snapshot(stats, engine.num_running, engine.num_waiting, engine.pool.usage)


def ready(engine: Engine) -> Ready:
    """What the server has to know of the engine."""
    limits = engine.limits
    return Ready(
        model_name=engine.model_name,
        tokenizer=engine.tokenizer,
        vocab_size=engine.vocab_size,
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        num_pages=limits.num_pages,
        page_size=limits.page_size,
        max_drafts=limits.max_drafts,
        device=str(engine.device),
        sampling_defaults=engine.sampling_defaults,
    )


def failed(error: Exception, *, starting: bool) -> Failed:
    """The last message; without a trace where a setting or a file is at fault."""
    if starting and isinstance(error, CAUSED_BY_SETTINGS):
        return Failed(str(error) or type(error).__name__, "")
    return Failed(f"{type(error).__name__}: {error}", traceback.format_exc())


def main(fd: int) -> int:
    """Serve the socket `fd`, whose first message is the configuration."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the server drains first, then closes the socket
    connection: Connection[Any, Any] = Connection(fd)
    config = connection.recv()
    inbox: SimpleQueue[Any] = SimpleQueue()
    channel = Channel(connection, inbox.put, lambda: os._exit(0))
    heart = Heartbeat(channel.send)
    engine: Engine | None = None
    try:
        engine = Engine(config, lambda what, done, of: channel.send(Loading(what, done, of)))
        channel.send(snapshot(engine))
        channel.send(ready(engine))
        EngineLoop(engine, channel, inbox, heart).run()
    except Exception as error:
        channel.send(failed(error, starting=engine is None))
        channel.flush(LAST_WORDS_SECONDS)
    return 1


if __name__ == "__main__":
    os._exit(main(int(sys.argv[1])))
