"""The time limit of requests, and an end for all of them when the server closes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from anabranch.llm.server.errors import ServerClosing


class OpenRequests:
    """Requests that are being answered; of the event loop's thread alone."""

    def __init__(self, max_seconds: float) -> None:
        self._max_seconds = max_seconds
        self._deadlines: set[asyncio.Timeout] = set()
        self._ended = False

    @asynccontextmanager
    async def limited(self) -> AsyncGenerator[None]:
        """TimeoutError for what takes too long, ServerClosing for what the end interrupts."""
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
        """Interrupt every open request, and refuse new ones."""
        self._ended = True
        now = asyncio.get_running_loop().time()
        for deadline in self._deadlines:
            deadline.reschedule(now)
