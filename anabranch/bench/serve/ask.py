"""One request: sent, streamed, timed. It always ends, and never raises for the server's sake."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from anabranch.bench.serve.api import Api, Reply, fields_of, parse_body
from anabranch.bench.serve.events import EventReader
from anabranch.bench.serve.http_client import Response, open_response
from anabranch.bench.serve.outcome import Failure, Outcome

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
SAID_BY_CHAT = ("content", "reasoning_content", "reasoning", "tool_calls")


async def ask(
    api: Api, endpoint: str, body: dict[str, Any], *, leave_after: int | None = None
) -> Outcome:
    """The outcome of a streamed request; the clock runs from before it is connected.

    With `leave_after`, the connection is closed when so many chunks with tokens have come.
    """
    data = json.dumps(body).encode()
    outcome = Outcome(time.perf_counter())
    try:
        async with (
            asyncio.timeout(api.timeout),
            open_response(api.site, "POST", PATHS[endpoint], data) as response,
        ):
            outcome.failure = await _receive(response, outcome, leave_after)
    except TimeoutError:
        outcome.failure = Failure("timeout", f"no end after {api.timeout:g} s")
    except OSError as error:  # refused, reset, closed too early
        outcome.failure = Failure("connection", str(error) or type(error).__name__)
    except ValueError as error:  # lengths that are no numbers, lines without an end
        outcome.failure = Failure("bad HTTP", str(error))
    if outcome.failure is not None:
        outcome.end = time.perf_counter()
    return outcome


async def _receive(response: Response, outcome: Outcome, leave_after: int | None) -> Failure | None:
    if response.status != 200:
        return _refusal(response, parse_body(await response.read()))
    if "event-stream" not in response.headers.get("content-type", ""):
        return Failure("no stream", f"content type {response.headers.get('content-type')!r}")
    stream = TokenStream(outcome)
    events = EventReader()
    async for piece in response.pieces():
        now = time.perf_counter()
        for event in events.feed(piece):
            if (failure := stream.take(event, now)) is not None:
                return failure
        if stream.done:
            break
        if leave_after is not None and len(outcome.arrivals) >= leave_after:
            outcome.left = True
            return None
    return stream.verdict()


def _refusal(response: Response, body: Any) -> Failure:
    later = response.headers.get("retry-after")
    wait = f" (Retry-After {later})" if later else ""
    return Failure(f"HTTP {response.status}", Reply(response.status, body).message + wait)


class TokenStream:
    """Reads the events of one answer into an outcome."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._counted = False  # the server said how many tokens there were
        self._complete = False
        self.done = False  # nothing follows

    def take(self, event: str, now: float) -> Failure | None:
        """An event that arrived at this moment."""
        if event == "[DONE]":
            self._complete = self.done = True
            return None
        try:
            chunk: Any = json.loads(event)
        except ValueError:
            return Failure("bad event", event[:200])
        said = fields_of(chunk)
        if not said:
            return Failure("bad event", event[:200])
        if said.get("error"):
            return Failure("error in the stream", Reply(200, said).message)
        if usage := said.get("usage"):
            self._count(usage)
        for choice in said.get("choices") or ():
            self._arrive(choice, now)
        return None

    def verdict(self) -> Failure | None:
        """Once the stream is over."""
        if not self._complete:
            return Failure("cut short", "the stream ended without a finish_reason or [DONE]")
        if not self._outcome.arrivals:
            return Failure("no tokens", "the stream held no token")
        if not self._counted:
            self._outcome.num_output = len(self._outcome.arrivals)
        return None

    def _arrive(self, choice: dict[str, Any], now: float) -> None:
        ended = choice.get("finish_reason") is not None
        self._complete = self._complete or ended
        outcome = self._outcome
        if has_tokens(choice) or (ended and not outcome.arrivals):
            outcome.arrivals.append(now)
            outcome.end = now
        elif ended:
            outcome.end = now

    def _count(self, usage: dict[str, Any]) -> None:
        self._counted = "completion_tokens" in usage
        self._outcome.num_input = usage.get("prompt_tokens") or 0
        self._outcome.num_output = usage.get("completion_tokens") or 0
        details = fields_of(usage.get("prompt_tokens_details"))
        self._outcome.num_cached = details.get("cached_tokens") or 0


def has_tokens(choice: dict[str, Any]) -> bool:
    """Whether a chunk brings tokens; a token may add no text, as half of a character does."""
    delta: dict[str, Any] | None = choice.get("delta")
    said = [choice.get("text")] if delta is None else [delta.get(name) for name in SAID_BY_CHAT]
    if any(said) or choice.get("token_ids"):
        return True
    is_greeting = delta is not None and "role" in delta
    return choice.get("finish_reason") is None and not is_greeting
