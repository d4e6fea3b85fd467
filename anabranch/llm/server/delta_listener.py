"""Deltas of some requests that the engine reported and nobody has read yet."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from anabranch.llm.server.deltas import RequestDelta, join_deltas


class DeltaListener:
    """A mailbox on the event loop's thread. A slow reader gets several deltas as one."""

    def __init__(self, request_ids: Iterable[str]) -> None:
        self.open = set(request_ids)
        self._unread: dict[str, list[RequestDelta]] = {}
        self._error: Exception | None = None
        self._ready = asyncio.Event()

    def put(self, delta: RequestDelta) -> None:
        """Something new."""
        self._unread.setdefault(delta.request_id, []).append(delta)
        self._ready.set()

    def fail(self, error: Exception) -> None:
        """No delta follows."""
        self._error = error
        self._ready.set()

    async def next(self) -> list[RequestDelta]:
        """Everything unread, one delta for each request."""
        await self._ready.wait()
        self._ready.clear()
        if self._error is not None:
            raise self._error
        unread, self._unread = self._unread, {}
        return [join_deltas(deltas) for deltas in unread.values()]
