"""Runs a request and writes its answer, at once or as server-sent events.

A request ends when its client leaves. Nothing is sent before the first token, so that whatever
fails until then is answered with its own status.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
import time
import traceback
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from functools import partial

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from anabranch.llm.server.deltas import RequestDelta, join_deltas
from anabranch.llm.server.errors import EXPECTED_ERRORS, as_api_error
from anabranch.llm.server.openai_fields import Usage
from anabranch.llm.server.reply import DONE, Reply, as_json, count_usage
from anabranch.llm.server.service import Service

LAST_EVENT_SECONDS = 5.0  # for a client to read why its stream ends
_JSON = [(b"content-type", b"application/json")]
_EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold chunks back
]


class Answer(Response):
    """The response of an endpoint; the work is done while it is sent."""

    def __init__(self, service: Service, reply: Reply) -> None:
        super().__init__()
        self._service, self._reply = service, reply
        self._arrival = time.monotonic()
        self._prompts: list[list[int]] = []
        self._started = False
        self._num_output = 0
        self._num_cached = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Work until the answer is sent or the client is gone."""
        work = asyncio.ensure_future(self._work(send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            work.cancel()
            await asyncio.wait({work, gone})
        if not work.cancelled():
            work.result()

    async def _work(self, send: Send) -> None:
        service, reply = self._service, self._reply
        write = self._stream if reply.streams else self._send_whole
        try:
            with service.admission.admit(reply.num_prompts * reply.params.n):
                async with service.open_requests.limited():
                    encode = service.encoding.run(reply.num_chars, reply.encode)
                    self._prompts = await encode
                    async with aclosing(self._deltas()) as deltas:
                        await write(deltas, send)
        except Exception as error:
            if not self._started:
                raise
            await self._end_stream(error, send)

    async def _deltas(self) -> AsyncGenerator[tuple[int, RequestDelta]]:
        """What is new, with the index of its prompt."""
        ids = [secrets.token_hex(8) for _ in self._prompts]
        place_of = {request_id: place for place, request_id in enumerate(ids)}
        prompts = dict(zip(ids, self._prompts, strict=True))
        metrics = self._service.metrics
        watches = {name: metrics.watch(len(prompts[name]), self._arrival) for name in ids}
        generated = self._service.engine.generate(prompts, self._reply.params)
        try:
            async with aclosing(generated) as deltas:
                async for delta in deltas:
                    if watches[delta.request_id].observe(delta):
                        self._num_cached += delta.num_cached_tokens
                    self._num_output += delta.num_tokens
                    yield place_of[delta.request_id], delta
        finally:
            for watch in watches.values():
                watch.end()

    async def _send_whole(
        self, deltas: AsyncGenerator[tuple[int, RequestDelta]], send: Send
    ) -> None:
        parts: list[list[RequestDelta]] = [[] for _ in self._prompts]
        async for place, delta in deltas:
            parts[place].append(delta)
        num_items = self._num_output + sum(map(_num_logprobs, parts))
        body = await self._service.writing.run(num_items, partial(self._body, parts))
        headers = [*_JSON, (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _body(self, parts: list[list[RequestDelta]]) -> bytes:
        joined = [join_deltas(deltas) for deltas in parts]
        return as_json(self._reply.whole(joined, self._usage()))

    async def _stream(self, deltas: AsyncGenerator[tuple[int, RequestDelta]], send: Send) -> None:
        async for place, delta in deltas:
            events = await self._service.writing.run(
                delta.num_tokens + delta.num_logprobs, partial(self._reply.events, place, delta)
            )
            if not self._started:
                self._started = True
                await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
            await send({"type": "http.response.body", "body": events, "more_body": True})
        last = self._reply.last_events(self._usage()) + DONE
        await send({"type": "http.response.body", "body": last})

    async def _end_stream(self, error: Exception, send: Send) -> None:
        """A status was sent already, so the error becomes an event."""
        known = as_api_error(error)
        if known.status_code == 500 and not isinstance(error, EXPECTED_ERRORS):
            traceback.print_exception(error, file=sys.stderr)
        event = f"data: {known.body}\n\n".encode()
        with contextlib.suppress(TimeoutError):  # a client that reads nothing
            async with asyncio.timeout(LAST_EVENT_SECONDS):
                await send({"type": "http.response.body", "body": event})

    def _usage(self) -> Usage:
        return count_usage(self._prompts, self._num_output, self._num_cached)


def _num_logprobs(deltas: Iterable[RequestDelta]) -> int:
    return sum(delta.num_logprobs for delta in deltas)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
