"""How much a server takes on: bounds, a quota of sequences, deadlines, threads for long work."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TypeVar

from anabranch.llm.grammar.low_priority import lower_priority
from anabranch.llm.server.errors import ApiError, ServerClosing

RETRY_AFTER_SECONDS = 1
_LEAST = {
    "max_queue": 0,
    "max_body_bytes": 1,
    "max_connections": 1,
    "max_prompt_logprobs": 0,
    "max_prompt_tokens": 1,
}
LONG_CHARS = 1 << 16  # tokenized in 35 ms on one core of a server
MAX_WAITING_CHARS = 32 << 20  # of long texts that wait: a bound on memory
NUM_SHORT_THREADS = 2
LARGE_ANSWER = 1000  # tokens, logprobs or strings: written in a millisecond
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Bounds on single requests and on all of them."""

    max_queue: int = 256  # sequences that wait for a place among those the engine runs
    max_body_bytes: int = 8 << 20
    max_request_seconds: float = 600.0
    max_prompt_tokens: int | None = None  # what the model's context allows, if not given
    max_prompt_logprobs: int = 1 << 18  # of all prompts of a request, each time they are written
    header_seconds: float = 20.0  # for the headers of a request to arrive
    body_seconds: float = 60.0  # for its body to arrive
    max_connections: int = 1024  # one more ends the one that has waited longest for a request

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        for name in ("max_request_seconds", "header_seconds", "body_seconds"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, got {getattr(self, name)}")


class SequenceQuota:
    """Counts the sequences that were admitted and have not ended."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_open = 0

    @contextmanager
    def admit(self, num_seqs: int) -> Generator[None]:
        """Count sequences while a request runs; an ApiError where there is no room."""
        if num_seqs > self.capacity:
            raise ApiError(
                400,
                f"the request makes {num_seqs} sequences of its prompts and n; "
                f"this server takes at most {self.capacity}",
            )
        if self.num_open + num_seqs > self.capacity:
            raise ApiError(
                429,
                f"the server is full: {self.num_open} of {self.capacity} sequences are open; "
                f"try again in {RETRY_AFTER_SECONDS} s",
                code="queue_full",
                headers={"Retry-After": str(RETRY_AFTER_SECONDS)},
            )
        self.num_open += num_seqs
        try:
            yield
        finally:
            self.num_open -= num_seqs


class OpenRequests:
    """Requests that are being answered. Used by the event loop's thread only."""

    def __init__(self, max_seconds: float) -> None:
        self._max_seconds = max_seconds
        self._deadlines: set[asyncio.Timeout] = set()
        self._ended = False

    @asynccontextmanager
    async def limited(self) -> AsyncGenerator[None]:
        """Raise TimeoutError after the limit, ServerClosing when the server ends first."""
        if self._ended:
            raise ServerClosing
        deadline = asyncio.timeout(self._max_seconds)
        try:
            async with deadline:
                self._deadlines.add(deadline)
                yield
        except TimeoutError:
            if self._ended and deadline.expired():
                raise ServerClosing from None
            raise
        finally:
            self._deadlines.discard(deadline)

    def end_all(self) -> None:
        self._ended = True
        now = asyncio.get_running_loop().time()
        for deadline in self._deadlines:
            deadline.reschedule(now)


class EncodingThreads:
    """Run calls that tokenize. Long texts share a thread of low priority: short ones never wait."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(NUM_SHORT_THREADS, "encode-short")
        self._long = ThreadPoolExecutor(1, "encode-long", initializer=lower_priority)
        self._waiting_chars = 0

    async def run(self, num_chars: int, call: Callable[[], T]) -> T:
        """The result of a call that tokenizes `num_chars` characters."""
        loop = asyncio.get_running_loop()
        if num_chars <= LONG_CHARS:
            return await loop.run_in_executor(self._short, call)
        if self._waiting_chars and self._waiting_chars + num_chars > MAX_WAITING_CHARS:
            raise ApiError(
                429,
                "too many long prompts wait to be tokenized; try again in 1 s",
                code="queue_full",
                headers={"Retry-After": "1"},
            )
        self._waiting_chars += num_chars
        future = self._long.submit(call)
        # not when the caller leaves: a call that runs cannot be cancelled and holds its text
        future.add_done_callback(lambda _: self._count_down(loop, num_chars))
        return await asyncio.wrap_future(future)

    def _count_down(self, loop: asyncio.AbstractEventLoop, num_chars: int) -> None:
        def count() -> None:
            self._waiting_chars -= num_chars

        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(count)


class WritingThread:
    """Runs calls that write large answers, while the event loop answers others.

    One: each thread that runs Python takes its share of the interpreter from the event loop. Its
    priority is that of the event loop, which would wait for one that holds the interpreter's lock.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "write-answers")

    async def run(self, num_items: int, call: Callable[[], T]) -> T:
        """The result of a call that writes `num_items`: at once if they are few."""
        if num_items <= LARGE_ANSWER:
            return call()
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)
