"""An engine that is started again when its process ends or hangs, a bounded number of times."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass

from anabranch.llm.engine.async_llm import EngineDead
from anabranch.llm.engine.config import EngineConfig
from anabranch.llm.sampling.params import SamplingParams
from anabranch.llm.server.deltas import RequestDelta
from anabranch.llm.server.engine_process import EXIT_SECONDS, EngineProcess, Progress
from anabranch.llm.server.engine_watch import HangPolicy
from anabranch.llm.server.messages import Snapshot

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """How often an engine is started again before it is given up."""

    max_restarts: int = 3  # within `window_seconds`; 0 gives the engine up at its first end
    first_delay: float = 1.0  # seconds before the first restart; each further one waits twice that
    window_seconds: float = 600.0

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts must be at least 0, got {self.max_restarts}")
        if self.first_delay < 0 or self.window_seconds <= 0:
            raise ValueError(
                f"first_delay must be at least 0 and window_seconds above 0, "
                f"got {self.first_delay} and {self.window_seconds}"
            )


class RestartBudget:
    """Counts how often an engine's process has ended."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._ends: deque[float] = deque()  # seconds, as they were given

    def next_delay(self, now: float) -> float | None:
        """Seconds to wait after an end at `now`; None when there were too many."""
        policy = self._policy
        self._ends.append(now)
        while now - self._ends[0] > policy.window_seconds:
            self._ends.popleft()
        if len(self._ends) > policy.max_restarts:
            return None
        return policy.first_delay * 2 ** (len(self._ends) - 1)


class RestartingEngine:
    """Requests that are open when a process ends get EngineDead; later ones wait for the next.

    One thread waits for the end of each process, frees what it held and starts the next.
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: Progress | None = None,
        *,
        policy: RestartPolicy | None = None,
        hangs: HangPolicy | None = None,
    ) -> None:
        self._config, self._hangs = config, hangs
        self._budget = RestartBudget(policy or RestartPolicy())
        self._closing = threading.Event()
        self._end: str | None = None  # why no process follows
        self.num_restarts = 0
        self.given_up = False
        self._lock = threading.Lock()  # of the two that follow, which change together
        self._process = EngineProcess(config, progress, hangs=hangs)
        self._next: Future[EngineProcess] = Future()  # the process after this one
        self.info = self._process.info
        self._supervisor = threading.Thread(
            target=self._supervise, name="engine-supervisor", daemon=True
        )
        self._supervisor.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def trouble(self) -> str | None:
        """Why no request can be answered now, if so."""
        if self._end is not None:
            return self._end
        error = self._process.error
        return None if error is None else f"{error}; it is being restarted"

    @property
    def snapshot(self) -> Snapshot | None:
        return self._process.snapshot

    async def generate(
        self, prompts: Mapping[str, list[int]], params: SamplingParams
    ) -> AsyncGenerator[RequestDelta]:
        """As `EngineProcess.generate`, once a process runs."""
        process = await self._running()
        async with aclosing(process.generate(prompts, params)) as deltas:
            async for delta in deltas:
                yield delta

    def close(self) -> None:
        self._closing.set()
        self._fail("the engine was closed")
        self._process.close()
        self._supervisor.join(EXIT_SECONDS)  # longer only where a process is being started

    async def _running(self) -> EngineProcess:
        while True:
            with self._lock:
                process, following = self._process, self._next
            if process.error is None:
                return process
            # shielded, because others wait for the same future
            await asyncio.shield(asyncio.wrap_future(following))

    def _supervise(self) -> None:
        while True:
            reason = self._process.wait_until_ended()
            self._process.close()
            process = self._start_again(reason)
            if process is None or not self._publish(process):
                return

    def _publish(self, process: EngineProcess) -> bool:
        """Give a process to the requests that wait for it, unless the engine was closed."""
        with self._lock:
            closed = self._closing.is_set()
            if not closed:
                published, self._process, self._next = self._next, process, Future()
                published.set_result(process)
        if closed:
            process.close()
        return not closed

    def _fail(self, reason: str) -> None:
        with self._lock:
            self._end = self._end or reason
            if not self._next.done():
                self._next.set_exception(EngineDead(reason))

    def _start_again(self, reason: str) -> EngineProcess | None:
        while (delay := self._budget.next_delay(time.monotonic())) is not None:
            if not self._closing.is_set():
                log.warning("starting the engine again in %g s", delay)
            if self._closing.wait(delay):
                return None
            self.num_restarts += 1
            try:
                process = EngineProcess(self._config, hangs=self._hangs)
            except Exception as error:
                reason = str(error)
                log.error("%s", reason)
                continue
            log.warning("the engine runs again")
            return process
        if not self._closing.is_set():
            self._fail(f"{reason}; it was restarted {self.num_restarts} times and is given up")
            log.error("%s", self._end)
            self.given_up = True
        return None
