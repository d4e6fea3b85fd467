"""How answers are written: what completions and chats share, and server-sent events."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Generic, Literal, Protocol, TypeVar

from pydantic import BaseModel

from anabranch.llm.sampling.params import SamplingParams
from anabranch.llm.sampling.token_logprobs import TokenLogprobs
from anabranch.llm.server.deltas import ChoiceDelta, RequestDelta
from anabranch.llm.server.errors import refused
from anabranch.llm.server.openai_fields import (
    CachedTokens,
    PromptLogprobs,
    SamplingFields,
    TokenOrigin,
    Usage,
)
from anabranch.llm.server.service import Service
from anabranch.llm.server.token_texts import TokenStream

ORIGINS: tuple[Literal["sampled", "accepted", "corrected"], ...] = (
    "sampled",
    "accepted",
    "corrected",
)
LOWEST_LOGPROB = -9999.0  # JSON has no infinity
DONE = b"data: [DONE]\n\n"
_quoted = json.JSONEncoder(ensure_ascii=False).encode
Body = TypeVar("Body", bound=SamplingFields)


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


class SampledReply(Generic[Body]):
    """What completions and chats share: how objects begin, and what is reported of tokens."""

    params: SamplingParams

    def __init__(self, service: Service, body: Body, prefix: str) -> None:
        if body.stream and body.prompt_logprobs is not None:
            raise refused("stream", "prompt_logprobs do not come as a stream; leave out stream")
        if body.stream_options is not None and not body.stream:
            raise refused("stream_options", "stream_options need stream: true")
        self._service, self._body = service, body
        self._head = new_head(prefix, service.model_name)
        self._text_events = TextEvents()
        self._streams: dict[tuple[int, int], TokenStream] = {}  # by prompt and choice
        self._num_output: dict[int, int] = {}  # by choice
        self.streams = bool(body.stream)

    @cached_property
    def _sends_only_text(self) -> bool:
        """Whether chunks before the last carry text only."""
        body = self._body
        reports = body.return_token_ids or body.return_token_origins or body.counts_continuously
        return not reports and self.params.logprobs is None

    def _chunk_usage(
        self, index: int, prompt: Sequence[int], num_tokens: int, num_cached: int
    ) -> dict[str, Usage | None]:
        """The usage of a chunk that brings `num_tokens` of a choice: none, null, or counts so far.

        Counts are those of the chunk's own choice and prompt, as vLLM sends them.
        """
        if not self._body.counts_continuously:
            return {"usage": None} if self._body.includes_usage else {}
        total = self._num_output[index] = self._num_output.get(index, 0) + num_tokens
        return {"usage": count_usage([prompt], total, num_cached)}

    def _token_fields(self, place: int, choice: ChoiceDelta) -> dict[str, Any]:
        """What a body may ask of the new tokens of a choice."""
        fields: dict[str, Any] = {}
        if self._body.return_token_ids:
            fields["token_ids"] = choice.token_ids
        if self._body.return_token_origins:
            fields["token_origins"] = self._origins(place, choice)
        return fields

    def _origins(self, place: int, choice: ChoiceDelta) -> list[TokenOrigin]:
        texts, keeps = self._service.texts, self._body.skip_special_tokens is False
        stream = self._streams.setdefault((place, choice.number), TokenStream(texts))
        return [
            TokenOrigin(
                id=token,
                text=stream.push(token) if keeps or not texts.is_special(token) else "",
                origin=ORIGINS[choice.origins[i]],
                step=choice.steps[i],
                logprob=written(choice.logprobs[i][token].logprob) if choice.logprobs else None,
            )
            for i, token in enumerate(choice.token_ids)
        ]

    def _refuse_many_logprobs(self, prompts: Sequence[Sequence[int]], each: int) -> None:
        """Refuse an answer with too many logprobs of prompts, `each` of them for a token."""
        total, most = each * sum(map(len, prompts)), self._service.limits.max_prompt_logprobs
        if total > most:
            raise refused(
                "prompt_logprobs",
                f"the answer would have {total} logprobs of prompts, the most is {most}; ask for "
                "fewer at each token, or with fewer or shorter prompts",
            )

    def _prompt_logprobs(self, entries: Sequence[TokenLogprobs | None]) -> PromptLogprobs:
        """As vLLM writes them."""
        return [
            None
            if entry is None
            else {
                str(token): {
                    "logprob": written(item.logprob),
                    "rank": item.rank,
                    "decoded_token": self._service.texts.text_of(token),
                }
                for token, item in entry.items()
            }
            for entry in entries
        ]


def new_head(prefix: str, model: str) -> dict[str, Any]:
    """The fields that every object of an answer has."""
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "created": int(time.time()),
        "model": model,
    }


def count_usage(prompts: Sequence[Sequence[int]], num_output: int, num_cached: int) -> Usage:
    num_prompt = sum(len(prompt) for prompt in prompts)
    return Usage(
        prompt_tokens=num_prompt,
        completion_tokens=num_output,
        total_tokens=num_prompt + num_output,
        prompt_tokens_details=CachedTokens(cached_tokens=num_cached),
    )


def written(logprob: float) -> float:
    """A logprob that JSON can hold."""
    return max(logprob, LOWEST_LOGPROB)


def as_json(model: BaseModel) -> bytes:
    return model.model_dump_json(exclude_unset=True).encode()


def event_of(model: BaseModel) -> bytes:
    return b"data: " + as_json(model) + b"\n\n"


class TextEvents:
    """Events of choices that differ in their text alone: the rest is written once.

    Writing the model of every chunk takes six times as long, and there is one for every token.
    """

    def __init__(self) -> None:
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def event(self, index: int, text: str, chunk: Callable[[int, str], BaseModel]) -> bytes:
        """A choice's next text; `chunk` makes the model of a choice, by its index, with a text."""
        around = self._around.get(index)
        if around is None:
            mark = secrets.token_hex(16)  # occurs nowhere else
            event = event_of(chunk(index, mark))
            before, _, after = event.partition(_quoted(mark).encode())
            around = self._around[index] = before, after
        return around[0] + _quoted(text).encode() + around[1]
