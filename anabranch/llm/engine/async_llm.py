"""AsyncLLM: requests from an event loop, an engine in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field

from anabranch.llm.engine.admission import Prompt
from anabranch.llm.engine.engine import Engine
from anabranch.llm.engine.request import Request, RequestOutput
from anabranch.llm.grammar.grammar_compiler import CompiledGrammar
from anabranch.llm.sampling.params import SamplingParams

Outcome = RequestOutput | Exception


class EngineDead(RuntimeError):
    """The engine failed; no request can be answered any more."""


@dataclass(slots=True)
class _Listener:
    """Where the outputs of a request go; only the newest waits if the reader is slow."""

    loop: asyncio.AbstractEventLoop
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    newest: deque[Outcome] = field(default_factory=lambda: deque[Outcome](maxlen=1))

    def report(self, outcome: Outcome) -> None:
        """From the engine's thread."""
        self.newest.append(outcome)
        with suppress(RuntimeError):  # the reader's loop is closed
            self.loop.call_soon_threadsafe(self.ready.set)

    async def next(self) -> Outcome:
        """The newest outcome, once."""
        while not self.newest:
            await self.ready.wait()
            self.ready.clear()
        return self.newest.pop()


class AsyncLLM:
    """Streams outputs of many requests; a slow reader never delays a step."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.error: Exception | None = None
        self._listeners: dict[str, _Listener] = {}
        self._calls: deque[Callable[[], None]] = deque()  # for the engine's thread
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._loop, name="anabranch-engine", daemon=True)
        self._thread.start()

    async def generate(
        self, request_id: str, prompt: Prompt, params: SamplingParams
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of a request as it grows; leaving the loop aborts it.

        Raises ValueError for a bad request, and EngineDead if the engine fails.
        """
        listener = _Listener(asyncio.get_running_loop())
        grammar = None
        if getattr(params, "structured_outputs", None) is not None:  # it may be anything yet
            grammar = await asyncio.to_thread(self.engine.compile_grammar, params)
        self._call(lambda: self._add(listener, request_id, prompt, params, grammar))
        finished = False
        try:
            while not finished:
                outcome = await listener.next()
                if isinstance(outcome, Exception):
                    finished = True
                    raise outcome
                finished = outcome.finished
                yield outcome
        finally:
            if not finished:
                with suppress(EngineDead):
                    self._call(lambda: self._abort(request_id, listener))

    @property
    def alive(self) -> bool:
        """Whether requests can still be answered."""
        return self.error is None and self._thread.is_alive()

    def close(self) -> None:
        """Stop after the current step; open requests get EngineDead."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def _call(self, call: Callable[[], None]) -> None:
        with self._wake:
            if not self.alive:
                raise EngineDead(f"the engine is not running: {self.error or 'closed'}")
            self._calls.append(call)
            self._wake.notify()

    def _add(
        self,
        listener: _Listener,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        grammar: CompiledGrammar | None,
    ) -> None:
        try:
            self.engine.add_request(request_id, prompt, params, grammar)
        except Exception as error:  # whatever is wrong with it, the others go on
            listener.report(error)
        else:
            self._listeners[request_id] = listener

    def _abort(self, request_id: str, listener: _Listener) -> None:
        if self._listeners.get(request_id) is listener:
            del self._listeners[request_id]
            self.engine.abort(request_id)

    def _loop(self) -> None:
        try:
            while self._wait_for_work():
                for request in self.engine.step():
                    self._report(request)
        except Exception as error:
            self.error = error
        with self._wake:  # no call is added after this
            self.error = self.error or EngineDead("the engine was closed")
            while self._calls:
                with suppress(Exception):  # of an engine in whatever state it failed
                    self._calls.popleft()()
        for listener in self._listeners.values():
            listener.report(EngineDead(f"the engine failed: {self.error!r}"))

    def _wait_for_work(self) -> bool:
        """Run the calls that came in; False when closing."""
        while True:
            with self._wake:
                while not (self._calls or self._closing or self.engine.has_work):
                    self._wake.wait()
                if self._closing:
                    return False
                calls = list(self._calls)
                self._calls.clear()
            for call in calls:
                call()
            if self.engine.has_work:
                return True

    def _report(self, request: Request) -> None:
        listener = self._listeners.get(request.request_id)
        if listener is None:
            return
        try:
            listener.report(request.output())
        except Exception as error:  # of this request alone
            listener.report(error)
            self.engine.abort(request.request_id)
        if request.finished:
            del self._listeners[request.request_id]
