"""What completions and chats have in common: a job for the engine, and the parts of an answer."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Literal, Protocol, cast

from pydantic import BaseModel

from anabranch.llm.sampling.params import SamplingParams
from anabranch.llm.sampling.token_logprobs import TokenLogprobs
from anabranch.llm.server.deltas import ChoiceDelta, RequestDelta
from anabranch.llm.server.errors import ApiError
from anabranch.llm.server.protocol import (
    CachedTokens,
    PromptLogprobs,
    SamplingFields,
    TokenOrigin,
    Usage,
)
from anabranch.llm.server.server_limits import ServerLimits
from anabranch.llm.server.token_texts import TokenStream, TokenTexts

FinishReason = Literal["stop", "length"]
ORIGINS: tuple[Literal["sampled", "accepted", "corrected"], ...] = (
    "sampled",
    "accepted",
    "corrected",
)
LOWEST_LOGPROB = -9999.0  # JSON has no infinity


class Reply(Protocol):
    """One HTTP request, and how its answer is written."""

    params: SamplingParams
    streams: bool
    num_prompts: int
    num_chars: int  # of text to be tokenized

    def encode(self) -> list[list[int]]:
        """Tokens of each prompt; may take a while."""
        ...

    def events(self, place: int, delta: RequestDelta) -> bytes:
        """Events of a stream for something new of the prompt at `place`."""
        ...

    def last_events(self, usage: Usage) -> bytes:
        """Events that end a stream."""
        ...

    def whole(self, deltas: Sequence[RequestDelta], usage: Usage) -> BaseModel:
        """The answer to all prompts at once."""
        ...


class Head:
    """The fields that every object of an answer has."""

    def __init__(self, prefix: str, model: str) -> None:
        self.id = f"{prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.model = model


def refuse_stream_options(body: SamplingFields) -> None:
    """Options that contradict being streamed, or not."""
    if body.stream and body.prompt_logprobs is not None:
        raise ApiError(
            400, "prompt_logprobs do not come as a stream; leave out stream", param="stream"
        )
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options need stream: true", param="stream_options")


def sends_only_text(body: SamplingFields, params: SamplingParams) -> bool:
    """Whether chunks before the last carry text only."""
    more = body.return_token_ids or body.return_token_origins or params.logprobs is not None
    return not more and not body.counts_continuously


class ChunkUsage:
    """The usage in the chunks of a stream: none, null, or counts so far as vLLM sends them.

    Counts are those of the chunk's own choice and prompt.
    """

    def __init__(self, body: SamplingFields) -> None:
        self._includes, self._counts = body.includes_usage, body.counts_continuously
        self._num_output: dict[int, int] = {}  # by choice

    def fields(
        self, index: int, prompt: Sequence[int], num_tokens: int, num_cached: int
    ) -> dict[str, Usage | None]:
        """Of a chunk that brings `num_tokens` of a choice."""
        if not self._counts:
            return {"usage": None} if self._includes else {}
        total = self._num_output[index] = self._num_output.get(index, 0) + num_tokens
        return {"usage": count_usage([prompt], total, num_cached)}


def count_usage(prompts: Sequence[Sequence[int]], num_output: int, num_cached: int) -> Usage:
    """Tokens of all prompts and continuations."""
    num_prompt = sum(len(prompt) for prompt in prompts)
    return Usage(
        prompt_tokens=num_prompt,
        completion_tokens=num_output,
        total_tokens=num_prompt + num_output,
        prompt_tokens_details=CachedTokens(cached_tokens=num_cached),
    )


def finish_reason(choice: ChoiceDelta) -> FinishReason | None:
    """As OpenAI names it."""
    return cast("FinishReason | None", choice.finish_reason)


def written(logprob: float) -> float:
    """A logprob that JSON can hold."""
    return max(logprob, LOWEST_LOGPROB)


def refuse_many_logprobs(prompts: Sequence[Sequence[int]], each: int, limits: ServerLimits) -> None:
    """Refuse an answer with too many logprobs of prompts, `each` of them for a token."""
    total, most = each * sum(map(len, prompts)), limits.max_prompt_logprobs
    if total > most:
        raise ApiError(
            400,
            f"the answer would have {total} logprobs of prompts, the most is {most}; ask for fewer "
            "at each token, or with fewer or shorter prompts",
            param="prompt_logprobs",
        )


def prompt_logprobs(entries: Sequence[TokenLogprobs | None], texts: TokenTexts) -> PromptLogprobs:
    """As vLLM writes them."""
    return [
        None
        if entry is None
        else {
            str(token): {
                "logprob": written(item.logprob),
                "rank": item.rank,
                "decoded_token": texts.text_of(token),
            }
            for token, item in entry.items()
        }
        for entry in entries
    ]


class OriginWriter:
    """Where the tokens of each continuation came from."""

    def __init__(self, texts: TokenTexts, keep_special: bool) -> None:
        self._texts = texts
        self._keep_special = keep_special
        self._streams: dict[tuple[int, int], TokenStream] = {}

    def origins(self, place: int, choice: ChoiceDelta) -> list[TokenOrigin]:
        """Of the new tokens of a choice."""
        key = (place, choice.number)
        stream = self._streams.setdefault(key, TokenStream(self._texts))
        return [
            TokenOrigin(
                id=token,
                text=self._text(stream, token),
                origin=ORIGINS[choice.origins[i]],
                step=choice.steps[i],
                logprob=written(choice.logprobs[i][token].logprob) if choice.logprobs else None,
            )
            for i, token in enumerate(choice.token_ids)
        ]

    def _text(self, stream: TokenStream, token: int) -> str:
        hidden = self._texts.is_special(token) and not self._keep_special
        return "" if hidden else stream.push(token)
