"""One streamed request, timed. It always ends, and never raises because of the server."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import httpx

from anabranch.llm.bench.serve.endpoint import Endpoint, as_dict, error_message, parse_body

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
CHAT_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls")


class Failure(NamedTuple):
    """A kind that is counted, and the message of one of them."""

    kind: str
    message: str


@dataclass(slots=True)
class Outcome:
    """When the tokens of a request arrived, or why they did not; in seconds of one clock."""

    start: float
    arrivals: list[float] = field(default_factory=list[float])  # of chunks with tokens
    end: float = 0.0  # the last chunk of the answer, or the failure
    num_input: int = 0
    num_output: int = 0
    num_cached: int = 0
    failure: Failure | None = None
    disconnected: bool = False  # by the client, before the end

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.arrivals[0] - self.start

    @property
    def latency(self) -> float:
        """Time to the last token."""
        return self.end - self.start

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None of a single token."""
        if self.num_output < 2:
            return None
        return (self.latency - self.ttft) / (self.num_output - 1)

    @property
    def itls(self) -> list[float]:
        """Times between arrivals; several tokens may arrive at once."""
        return [b - a for a, b in pairwise(self.arrivals)]


async def send_request(
    endpoint: Endpoint, api: str, body: dict[str, Any], *, disconnect_after: int | None = None
) -> Outcome:
    """The outcome of a request; the clock starts before the connection is made.

    With `disconnect_after`, the connection is closed after so many chunks with tokens.
    """
    outcome = Outcome(time.perf_counter())
    try:
        async with (
            asyncio.timeout(endpoint.timeout),
            endpoint.http.stream("POST", PATHS[api], json=body) as response,
        ):
            outcome.failure = await _receive(response, outcome, disconnect_after)
    except (TimeoutError, httpx.TimeoutException):
        outcome.failure = Failure("timeout", f"no end after {endpoint.timeout:g} s")
    except httpx.HTTPError as error:  # refused, reset, closed too early, not HTTP
        outcome.failure = Failure("connection", str(error) or type(error).__name__)
    if outcome.failure is not None:
        outcome.end = time.perf_counter()
    return outcome


def check_answer(outcome: Outcome) -> None:
    """Refuse to measure a server that fails."""
    if outcome.failure is not None:
        raise ValueError("the server fails to answer: {}: {}".format(*outcome.failure))


async def _receive(
    response: httpx.Response, outcome: Outcome, disconnect_after: int | None
) -> Failure | None:
    headers = response.headers
    if response.status_code != 200:
        await response.aread()
        retry = f" (Retry-After {headers['retry-after']})" if "retry-after" in headers else ""
        return Failure(f"HTTP {response.status_code}", error_message(parse_body(response)) + retry)
    if "event-stream" not in headers.get("content-type", ""):
        return Failure("no stream", f"content type {headers.get('content-type')!r}")
    complete = False
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        event = line[5:].strip()
        if event == "[DONE]":
            complete = True
            break
        chunk = _parse(event)
        if isinstance(chunk, Failure):
            return chunk
        complete |= _take(chunk, outcome, time.perf_counter())
        if disconnect_after is not None and len(outcome.arrivals) >= disconnect_after:
            outcome.disconnected = True
            return None
    if not complete:
        return Failure("cut short", "the stream ended without a finish_reason or [DONE]")
    if not outcome.arrivals:
        return Failure("no tokens", "the stream held no token")
    outcome.num_output = outcome.num_output or len(outcome.arrivals)  # without usage
    return None


def _parse(event: str) -> dict[str, Any] | Failure:
    try:
        chunk = as_dict(json.loads(event))
    except ValueError:
        chunk = {}
    if not chunk:
        return Failure("bad event", event[:200])
    return Failure("error in the stream", error_message(chunk)) if chunk.get("error") else chunk


def _take(chunk: dict[str, Any], outcome: Outcome, now: float) -> bool:
    """Read a chunk into an outcome; whether the answer has a finish reason."""
    if usage := as_dict(chunk.get("usage")):
        outcome.num_input = usage.get("prompt_tokens") or 0
        outcome.num_output = usage.get("completion_tokens") or 0
        details = as_dict(usage.get("prompt_tokens_details"))
        outcome.num_cached = details.get("cached_tokens") or 0
    finished = False
    for choice in chunk.get("choices") or ():
        ended = choice.get("finish_reason") is not None
        arrives = has_tokens(choice) or (ended and not outcome.arrivals)
        outcome.arrivals += [now] if arrives else []
        outcome.end = now if arrives or ended else outcome.end
        finished |= ended
    return finished


def has_tokens(choice: dict[str, Any]) -> bool:
    """Whether a chunk holds tokens; a token may add no text, as half of a character does."""
    delta: dict[str, Any] | None = choice.get("delta")
    texts = [choice.get("text")] if delta is None else [delta.get(name) for name in CHAT_FIELDS]
    is_greeting = delta is not None and "role" in delta
    plain = choice.get("finish_reason") is None and not is_greeting
    return plain or any(texts) or bool(choice.get("token_ids"))
