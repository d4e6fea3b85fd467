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
from anabranch.llm.server.errors import REFUSALS, ApiError, blaming_the_request
from anabranch.llm.server.events import TextEvents, event_of
from anabranch.llm.server.protocol import Usage
from anabranch.llm.server.reply import (
    ChunkUsage,
    Head,
    OriginWriter,
    finish_reason,
    prompt_logprobs,
    refuse_many_logprobs,
    refuse_stream_options,
    sends_only_text,
    written,
)
from anabranch.llm.server.service import Service, service_of

router = APIRouter()


@router.post("/v1/completions", response_model=Completion, responses=REFUSALS)
async def create_completion(request: Request, body: CompletionRequest) -> Response:
    """Continue prompts."""
    service = service_of(request)
    service.check_model(body.model)
    return Answer(service, CompletionReply(service, body))


class CompletionReply:
    """Choices are numbered by prompt, then by continuation."""

    def __init__(self, service: Service, body: CompletionRequest) -> None:
        refuse_stream_options(body)
        _refuse(body)
        self._service, self._body = service, body
        self._head = Head("cmpl", service.model_name)
        self._prompts: list[list[int]] = []
        self._prompt_logprobs: dict[int, list[TokenLogprobs | None]] = {}  # by place
        self._offsets: dict[int, int] = {}  # by choice: where its next token begins
        self._texts = TextEvents()
        self._usage = ChunkUsage(body)
        self._origins = OriginWriter(service.texts, body.skip_special_tokens is False)
        self._given = _listed(body.prompt)
        self.num_prompts = len(self._given)
        self.num_chars = sum(len(prompt) for prompt in self._given if isinstance(prompt, str))
        for prompt in self._given:
            if isinstance(prompt, str):
                service.encoder.refuse_by_bytes([prompt], "prompt")
        self.streams = bool(body.stream)
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
        self._sends_only_text = sends_only_text(body, self.params)

    def encode(self) -> list[list[int]]:
        """Tokens of each prompt."""
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
        refuse_many_logprobs(self._prompts, self._prompt_logprobs_each(), self._service.limits)
        return self._prompts

    def _prompt_logprobs_each(self) -> int:
        """Written for each token of a prompt: once a prompt, and with every echo."""
        body, each = self._body, 0
        if body.prompt_logprobs is not None:
            each += body.prompt_logprobs + 1
        if body.echo and body.logprobs is not None:
            each += body.num_choices * (body.logprobs + 1)
        return each

    def events(self, place: int, delta: RequestDelta) -> bytes:
        """One for each continuation that has something new."""
        return b"".join(self._event(place, choice, delta) for choice in delta.choices)

    def _event(self, place: int, choice: ChoiceDelta, delta: RequestDelta) -> bytes:
        index = place * self._body.num_choices + choice.number
        has_begun = index in self._offsets
        if has_begun and self._sends_only_text and choice.finish_reason is None:
            return self._texts.event(index, choice.text, self._text_chunk)
        num_tokens = len(choice.token_ids) if self._body.max_tokens != 0 else 0
        num_cached = delta.num_cached_tokens
        usage = self._usage.fields(index, self._prompts[place], num_tokens, num_cached)
        return event_of(self._object([self._choice(place, choice, delta)], **usage))

    def _text_chunk(self, index: int, text: str) -> Completion:
        nothing_else: dict[str, Any] = {"logprobs": None, "finish_reason": None}
        choice = CompletionChoice(index=index, text=text, **nothing_else, stop_reason=None)
        return self._object([choice], **self._usage.fields(index, (), 0, 0))

    def last_events(self, usage: Usage) -> bytes:
        """The usage, if asked for."""
        if not self._body.includes_usage:
            return b""
        return event_of(self._object([], usage=self._reported(usage)))

    def whole(self, deltas: Sequence[RequestDelta], usage: Usage) -> BaseModel:
        """All choices."""
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
        head = self._head
        return Completion(
            id=head.id,
            object="text_completion",
            created=head.created,
            model=head.model,
            choices=choices,
            **more,
        )

    def _choice(self, place: int, choice: ChoiceDelta, delta: RequestDelta) -> CompletionChoice:
        body, prompt = self._body, self._prompts[place]
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs[place] = delta.prompt_logprobs
        index = place * body.num_choices + choice.number
        echoes = bool(body.echo) and index not in self._offsets
        if body.max_tokens == 0:
            choice = choice._replace(text="", token_ids=[], logprobs=[], finish_reason="length")
        logprobs = None
        if body.logprobs is not None:
            of_prompt = self._prompt_logprobs[place] if echoes else []
            logprobs = self._logprobs(
                index, (prompt if echoes else []) + choice.token_ids, of_prompt + choice.logprobs
            )
        self._offsets.setdefault(index, 0)
        return CompletionChoice(
            index=index,
            text=(self._echoed(place) if echoes else "") + choice.text,
            logprobs=logprobs,
            finish_reason=finish_reason(choice),
            stop_reason=choice.stop_reason,
            **self._extras(place, choice),
        )

    def _extras(self, place: int, choice: ChoiceDelta) -> dict[str, Any]:
        body, extras = self._body, dict[str, Any]()
        if body.prompt_logprobs is not None and choice.number == 0:
            entries = self._prompt_logprobs[place]
            extras["prompt_logprobs"] = prompt_logprobs(entries, self._service.texts)
        if body.return_token_ids:
            extras |= {"prompt_token_ids": self._prompts[place], "token_ids": choice.token_ids}
        if body.return_token_origins:
            extras["token_origins"] = self._origins.origins(place, choice)
        return extras

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
        """By text; where two tokens have the same, the likelier counts."""
        top: dict[str, float] = {}
        for other, item in sorted(entry.items(), key=lambda pair: pair[1].rank):
            if item.rank <= wanted or other == token:
                top.setdefault(self._service.texts.text_of(other), written(item.logprob))
        return top


def _listed(prompt: Any) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise ApiError(400, "the prompt is empty; give at least one token", param="prompt")
    return [prompt] if isinstance(prompt[0], int) else prompt


def _refuse(body: CompletionRequest) -> None:
    if body.suffix:
        raise ApiError(400, "suffix is not supported; leave it out", param="suffix")
    if body.best_of is not None and body.best_of != body.num_choices:
        raise ApiError(
            400,
            f"best_of must equal n, got {body.best_of} and {body.num_choices}",
            param="best_of",
        )
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens must be at least 1 without echo", param="max_tokens")
