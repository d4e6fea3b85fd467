"""An engine that is started again when its process ends, a bounded number of times."""

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
from anabranch.llm.server.engine_process import EngineProcess, Progress
from anabranch.llm.server.messages import Snapshot

NOTICE_SECONDS = 0.02  # until an end that one thread has seen is known to all
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


class RestartingEngine:
    """Requests that are open when a process ends get EngineDead; later ones wait for the next."""

    def __init__(
        self,
        config: EngineConfig,
        progress: Progress | None = None,
        *,
        policy: RestartPolicy | None = None,
    ) -> None:
        self._config, self._policy = config, policy or RestartPolicy()
        self._ends: deque[float] = deque()  # seconds of time.monotonic
        self._closing = threading.Event()
        self._lock = threading.Lock()  # of `_next`
        self._reason: str | None = None  # why there is no process now
        self._next: Future[EngineProcess] = Future()
        self.num_restarts = 0
        self.given_up = False  # whether there is no next process
        self._process = EngineProcess(config, progress, ended=self._ended)
        self.info = self._process.info
        self._publish(self._next, self._process)

    @property
    def pid(self) -> int:
        """Of the newest process."""
        return self._process.pid

    @property
    def trouble(self) -> str | None:
        """Why no request can be answered now, if so."""
        return self._reason or self._process.trouble

    @property
    def snapshot(self) -> Snapshot | None:
        """The newest counts of the running process."""
        return None if self._reason else self._process.snapshot

    async def generate(
        self, prompts: Mapping[str, list[int]], params: SamplingParams
    ) -> AsyncGenerator[RequestDelta]:
        """As of `EngineProcess`, once there is one that runs."""
        process = await self._running()
        async with aclosing(process.generate(prompts, params)) as deltas:
            async for delta in deltas:
                yield delta

    def close(self) -> None:
        """End the process; open requests get EngineDead."""
        self._closing.set()
        self._fail("the engine was closed")
        self._process.close()

    async def _running(self) -> EngineProcess:
        while True:
            # shielded, because others wait for the same future
            process = await asyncio.shield(asyncio.wrap_future(self._next))
            if process.error is None:
                return process
            await asyncio.sleep(NOTICE_SECONDS)

    def _publish(self, waited_for: Future[EngineProcess], process: EngineProcess) -> None:
        with self._lock:
            self._process = process
            if not waited_for.done():  # closed meanwhile
                waited_for.set_result(process)

    def _fail(self, reason: str) -> None:
        failed = Future[EngineProcess]()
        failed.set_exception(EngineDead(reason))
        with self._lock:
            self._reason, waited_for, self._next = reason, self._next, failed
            if not waited_for.done():
                waited_for.set_exception(EngineDead(reason))

    def _ended(self, reason: str) -> None:
        """From a thread of the process that ended."""
        if self._closing.is_set():
            return
        with self._lock:
            self._reason, self._next = f"{reason}; it is being restarted", Future()
            args = (reason, self._next)
        threading.Thread(target=self._restart, args=args, name="restart", daemon=True).start()

    def _restart(self, reason: str, waited_for: Future[EngineProcess]) -> None:
        while (delay := self._next_delay()) is not None:
            log.warning("starting the engine again in %g s", delay)
            if self._closing.wait(delay):
                return
            self.num_restarts += 1
            try:
                process = EngineProcess(self._config, ended=self._ended)
            except Exception as error:
                reason = str(error)
                log.error("%s", reason)
                continue
            if self._closing.is_set():
                process.close()
                return
            log.warning("the engine runs again")
            self._reason = None
            self._publish(waited_for, process)
            return
        self._fail(f"{reason}; it was restarted {self.num_restarts} times and is given up")
        log.error("%s", self._reason)
        self.given_up = True

    def _next_delay(self) -> float | None:
        """Seconds to wait before a restart; None when there were too many."""
        policy, now = self._policy, time.monotonic()
        self._ends.append(now)
        while now - self._ends[0] > policy.window_seconds:
            self._ends.popleft()
        if len(self._ends) > policy.max_restarts:
            return None
        return policy.first_delay * 2 ** (len(self._ends) - 1)
