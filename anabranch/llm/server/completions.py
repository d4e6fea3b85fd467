"""`/v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from anabranch.llm.sampling.token_logprobs import TokenLogprobs
from anabranch.llm.server.answer import Answer
from anabranch.llm.server.completion_models import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from anabranch.llm.server.deltas import ChoiceDelta, RequestDelta
from anabranch.llm.server.errors import REFUSALS, blaming_the_request, refused
from anabranch.llm.server.openai_fields import Usage
from anabranch.llm.server.reply import SampledReply, event_of, written
from anabranch.llm.server.service import Service, service_of

router = APIRouter()


@router.post("/v1/completions", response_model=Completion, responses=REFUSALS)
async def create_completion(request: Request, body: CompletionRequest) -> Response:
    """Continue prompts."""
    service = service_of(request)
    service.check_model(body.model)
    return Answer(service, CompletionReply(service, body))


class CompletionReply(SampledReply[CompletionRequest]):
    """Choices are numbered by prompt, then by continuation."""

    def __init__(self, service: Service, body: CompletionRequest) -> None:
        super().__init__(service, body, "cmpl")
        _refuse(body)
        self._prompts: list[list[int]] = []
        self._entries: dict[int, list[TokenLogprobs | None]] = {}  # logprobs of prompts, by place
        self._offsets: dict[int, int] = {}  # by choice: where its next token begins
        self._given = _listed(body.prompt)
        self.num_prompts = len(self._given)
        texts = [prompt for prompt in self._given if isinstance(prompt, str)]
        self.num_chars = sum(map(len, texts))
        for text in texts:
            service.encoder.refuse_by_bytes([text], "prompt")
        options: dict[str, Any] = {"logprobs": body.logprobs}
        if body.max_tokens != 0:
            options["max_tokens"] = body.max_tokens
        else:
            options |= {"max_tokens": 1, "min_tokens": 0}  # computed, and not sent
        if body.echo and body.logprobs is not None:
            options["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
        with blaming_the_request():
            self.params = body.sampling_params(
                service.engine.info.sampling_defaults, **options, **body.rules()
            )

    def encode(self) -> list[list[int]]:
        encoder, truncate = self._service.encoder, self._body.truncate_prompt_tokens
        options = {
            "special": self._body.add_special_tokens is not False,
            "unlimited": truncate is not None,
        }
        for prompt in self._given:
            ids = encoder.text(prompt, **options) if isinstance(prompt, str) else prompt
            self._prompts.append(
                encoder.fitted(ids, truncate=truncate, max_tokens=self._body.max_tokens)
            )
        self._refuse_many_logprobs(self._prompts, self._prompt_logprobs_each())
        return self._prompts

    def _prompt_logprobs_each(self) -> int:
        """Logprobs for each token of a prompt: once a prompt, and again with every echo."""
        body, each = self._body, 0
        if body.prompt_logprobs is not None:
            each += body.prompt_logprobs + 1
        if body.echo and body.logprobs is not None:
            each += body.num_choices * (body.logprobs + 1)
        return each

    def events(self, place: int, delta: RequestDelta) -> bytes:
        return b"".join(self._event(place, choice, delta) for choice in delta.choices)

    def _event(self, place: int, choice: ChoiceDelta, delta: RequestDelta) -> bytes:
        index = place * self._body.num_choices + choice.number
        has_begun = index in self._offsets
        if has_begun and self._sends_only_text and choice.finish_reason is None:
            return self._text_events.event(index, choice.text, self._text_chunk)
        num_tokens = len(choice.token_ids) if self._body.max_tokens != 0 else 0
        num_cached = delta.num_cached_tokens
        usage = self._chunk_usage(index, self._prompts[place], num_tokens, num_cached)
        return event_of(self._object([self._choice(place, choice, delta)], **usage))

    def _text_chunk(self, index: int, text: str) -> Completion:
        nothing_else: dict[str, Any] = {"logprobs": None, "finish_reason": None}
        choice = CompletionChoice(index=index, text=text, **nothing_else, stop_reason=None)
        return self._object([choice], **self._chunk_usage(index, (), 0, 0))

    def last_events(self, usage: Usage) -> bytes:
        if not self._body.includes_usage:
            return b""
        return event_of(self._object([], usage=self._reported(usage)))

    def whole(self, deltas: Sequence[RequestDelta], usage: Usage) -> BaseModel:
        choices = [
            self._choice(place, choice, delta)
            for place, delta in enumerate(deltas)
            for choice in delta.choices
        ]
        return self._object(choices, usage=self._reported(usage))

    def _reported(self, usage: Usage) -> Usage:
        if self._body.max_tokens != 0:
            return usage
        return usage.model_copy(
            update={"completion_tokens": 0, "total_tokens": usage.prompt_tokens}
        )

    def _object(self, choices: list[CompletionChoice], **more: Any) -> Completion:
        return Completion(object="text_completion", choices=choices, **self._head, **more)

    def _choice(self, place: int, choice: ChoiceDelta, delta: RequestDelta) -> CompletionChoice:
        body, prompt = self._body, self._prompts[place]
        if delta.prompt_logprobs is not None:
            self._entries[place] = delta.prompt_logprobs
        index = place * body.num_choices + choice.number
        echoes = bool(body.echo) and index not in self._offsets
        if body.max_tokens == 0:
            choice = choice._replace(text="", token_ids=[], logprobs=[], finish_reason="length")
        logprobs = None
        if body.logprobs is not None:
            of_prompt = self._entries[place] if echoes else []
            logprobs = self._logprobs(
                index, (prompt if echoes else []) + choice.token_ids, of_prompt + choice.logprobs
            )
        self._offsets.setdefault(index, 0)
        extras: dict[str, Any] = {"finish_reason": choice.finish_reason}
        if body.prompt_logprobs is not None and choice.number == 0:
            extras["prompt_logprobs"] = self._prompt_logprobs(self._entries[place])
        if body.return_token_ids:
            extras["prompt_token_ids"] = prompt
        return CompletionChoice(
            index=index,
            text=(self._echoed(place) if echoes else "") + choice.text,
            logprobs=logprobs,
            stop_reason=choice.stop_reason,
            **extras,
            **self._token_fields(place, choice),
        )

    def _echoed(self, place: int) -> str:
        given = self._given[place]
        whole = isinstance(given, str) and self._body.truncate_prompt_tokens is None
        return cast("str", given) if whole else self._service.texts.decode(self._prompts[place])

    def _logprobs(
        self, index: int, tokens: list[int], entries: Sequence[TokenLogprobs | None]
    ) -> CompletionLogprobs:
        texts, wanted = self._service.texts, self._body.logprobs or 0
        names = [texts.text_of(token) for token in tokens]
        offsets = [self._offsets.get(index, 0)]
        for name in names:
            offsets.append(offsets[-1] + len(name))
        self._offsets[index] = offsets[-1]
        pairs = list(zip(tokens, entries, strict=True))
        return CompletionLogprobs(
            tokens=names,
            token_logprobs=[
                written(entry[token].logprob) if entry else None for token, entry in pairs
            ],
            top_logprobs=[
                self._top(token, entry, wanted) if entry else None for token, entry in pairs
            ],
            text_offset=[start for start, _ in pairwise(offsets)],
        )

    def _top(self, token: int, entry: TokenLogprobs, wanted: int) -> dict[str, float]:
        """Logprobs by text; of two tokens with one text, the likelier counts."""
        top: dict[str, float] = {}
        for other, item in sorted(entry.items(), key=lambda pair: pair[1].rank):
            if item.rank <= wanted or other == token:
                top.setdefault(self._service.texts.text_of(other), written(item.logprob))
        return top


def _listed(prompt: Any) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise refused("prompt", "the prompt is empty; give at least one token")
    return [prompt] if isinstance(prompt[0], int) else prompt


def _refuse(body: CompletionRequest) -> None:
    if body.suffix:
        raise refused("suffix", "suffix is not supported; leave it out")
    if body.best_of is not None and body.best_of != body.num_choices:
        message = f"best_of must equal n, got {body.best_of} and {body.num_choices}"
        raise refused("best_of", message)
    if body.max_tokens == 0 and not body.echo:
        raise refused("max_tokens", "max_tokens must be at least 1 without echo")
