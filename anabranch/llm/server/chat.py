"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from anabranch.llm.sampling.token_logprobs import TokenLogprobs
from anabranch.llm.server.answer import Answer
from anabranch.llm.server.chat_job import ChatJob
from anabranch.llm.server.chat_message import MessageWriter
from anabranch.llm.server.chat_models import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatRequest,
    TokenLogprob,
    TopLogprob,
)
from anabranch.llm.server.deltas import ChoiceDelta, RequestDelta
from anabranch.llm.server.errors import REFUSALS, ApiError
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


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=REFUSALS)
async def create_chat_completion(request: Request, body: ChatRequest) -> Response:
    """Continue a conversation."""
    service = service_of(request)
    service.check_model(body.model)
    return Answer(service, ChatReply(service, body))


class ChatReply:
    """A conversation is one prompt, by the model's chat template."""

    num_prompts = 1

    def __init__(self, service: Service, body: ChatRequest) -> None:
        refuse_stream_options(body)
        _refuse(body)
        self._service, self._body = service, body
        self._head = Head("chatcmpl", service.model_name)
        self._greeted: set[int] = set()
        self._texts = TextEvents()
        self._usage = ChunkUsage(body)
        self._origins = OriginWriter(service.texts, body.skip_special_tokens is False)
        self._prompt: list[int] = []
        self._job = ChatJob(service, body)
        self._writers: dict[int, MessageWriter] = {}
        self.streams = bool(body.stream)
        self.num_chars, self.params = self._job.num_chars, self._job.params
        self._sends_only_text = sends_only_text(body, self.params)

    def encode(self) -> list[list[int]]:
        """Tokens of the conversation."""
        self._prompt = self._job.encode()
        self.params = self._job.params
        if (wanted := self._body.prompt_logprobs) is not None:
            refuse_many_logprobs([self._prompt], wanted + 1, self._service.limits)
        return [self._prompt]

    def _writer(self, number: int) -> MessageWriter | None:
        """Of an answer that is taken apart."""
        if number not in self._writers and (parser := self._job.parser()) is not None:
            self._writers[number] = MessageWriter(parser, self._job.shown)
        return self._writers.get(number)

    def events(self, place: int, delta: RequestDelta) -> bytes:
        """One for each answer that has something new, after one with the role."""
        return b"".join(
            self._greeting(each, delta) + self._event(each, delta) for each in delta.choices
        )

    def _greeting(self, choice: ChoiceDelta, delta: RequestDelta) -> bytes:
        if choice.number in self._greeted:
            return b""
        self._greeted.add(choice.number)
        hello = AssistantMessage(role="assistant", content="")
        usage = self._usage.fields(choice.number, self._prompt, 0, delta.num_cached_tokens)
        details = {"logprobs": None, "finish_reason": None}
        return event_of(self._chunk(hello, choice.number, usage, **details))

    def _event(self, choice: ChoiceDelta, delta: RequestDelta) -> bytes:
        writer = self._writer(choice.number)
        if writer is not None:
            return self._parsed_events(writer, choice, delta)
        if self._sends_only_text and choice.finish_reason is None:
            return self._texts.event(choice.number, choice.text, self._text_chunk)
        said = AssistantMessage.model_validate({"content": choice.text})
        num_tokens, num_cached = len(choice.token_ids), delta.num_cached_tokens
        usage = self._usage.fields(choice.number, self._prompt, num_tokens, num_cached)
        return event_of(self._chunk(said, choice.number, usage, **self._details(choice)))

    def _parsed_events(
        self, writer: MessageWriter, choice: ChoiceDelta, delta: RequestDelta
    ) -> bytes:
        """A chunk for each thing that is new; the last has what belongs to the tokens."""
        final = choice.finish_reason is not None
        said = writer.deltas(choice.text, final=final)
        if not said and self._sends_only_text and not final:
            return b""
        said = said or [{}]
        num_tokens, num_cached = len(choice.token_ids), delta.num_cached_tokens
        usage = self._usage.fields(choice.number, self._prompt, num_tokens, num_cached)
        nothing = {"logprobs": None, "finish_reason": None}
        chunks = [
            self._chunk(AssistantMessage.model_validate(each), choice.number, usage, **nothing)
            for each in said[:-1]
        ]
        last = AssistantMessage.model_validate(said[-1])
        details = self._details(choice)
        return b"".join(
            map(event_of, [*chunks, self._chunk(last, choice.number, usage, **details)])
        )

    def _text_chunk(self, index: int, text: str) -> ChatChunk:
        said = AssistantMessage.model_validate({"content": text})
        usage = self._usage.fields(index, self._prompt, 0, 0)
        return self._chunk(said, index, usage, logprobs=None, finish_reason=None, stop_reason=None)

    def last_events(self, usage: Usage) -> bytes:
        """The usage, if asked for."""
        if not self._body.includes_usage:
            return b""
        last = ChatChunk(object="chat.completion.chunk", choices=[], usage=usage, **self._named())
        return event_of(last)

    def whole(self, deltas: Sequence[RequestDelta], usage: Usage) -> BaseModel:
        """All answers."""
        (delta,) = deltas
        choices = [
            ChatChoice(
                index=choice.number,
                message=self._message(choice),
                **self._details(choice),
            )
            for choice in delta.choices
        ]
        extras: dict[str, Any] = {}
        if delta.prompt_logprobs is not None:
            extras["prompt_logprobs"] = prompt_logprobs(delta.prompt_logprobs, self._service.texts)
        if self._body.return_token_ids:
            extras["prompt_token_ids"] = self._prompt
        return ChatCompletion(
            object="chat.completion", choices=choices, usage=usage, **self._named(), **extras
        )

    def _message(self, choice: ChoiceDelta) -> AssistantMessage:
        writer = self._writer(choice.number)
        if writer is None:
            return AssistantMessage(role="assistant", content=choice.text)
        return writer.whole(choice.text)

    def _named(self) -> dict[str, Any]:
        head = self._head
        return {"id": head.id, "created": head.created, "model": head.model}

    def _chunk(
        self, said: AssistantMessage, index: int, usage: dict[str, Usage | None], **details: Any
    ) -> ChatChunk:
        choice = ChatChunkChoice(index=index, delta=said, **details)
        named: dict[str, Any] = {**self._named(), **usage}
        return ChatChunk(object="chat.completion.chunk", choices=[choice], **named)

    def _details(self, choice: ChoiceDelta) -> dict[str, Any]:
        body = self._body
        details: dict[str, Any] = {
            "logprobs": None,
            "finish_reason": finish_reason(choice),
            "stop_reason": choice.stop_reason,
        }
        writer = self._writers.get(choice.number)
        if choice.finish_reason == "stop" and writer is not None and writer.num_calls:
            details["finish_reason"] = "tool_calls"
        if body.logprobs:
            pairs = zip(choice.token_ids, choice.logprobs, strict=True)
            content = [self._logprob(token, entry) for token, entry in pairs]
            details["logprobs"] = ChatLogprobs(content=content)
        if body.return_token_ids:
            details["token_ids"] = choice.token_ids
        if body.return_token_origins:
            details["token_origins"] = self._origins.origins(0, choice)
        return details

    def _logprob(self, token: int, entry: TokenLogprobs) -> TokenLogprob:
        wanted = self._body.top_logprobs or 0
        ranked = sorted(entry.items(), key=lambda pair: pair[1].rank)
        top = [
            TopLogprob(**self._written(other, item.logprob))
            for other, item in ranked[:wanted]
            if item.rank <= wanted
        ]
        return TokenLogprob(**self._written(token, entry[token].logprob), top_logprobs=top)

    def _written(self, token: int, logprob: float) -> dict[str, Any]:
        as_bytes = self._service.texts.bytes_of(token)
        return {
            "token": as_bytes.decode(errors="replace"),
            "logprob": written(logprob),
            "bytes": list(as_bytes),
        }


def _refuse(body: ChatRequest) -> None:
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    if None not in (body.max_tokens, body.max_completion_tokens) and (
        body.max_tokens != body.max_completion_tokens
    ):
        raise ApiError(
            400,
            f"max_tokens {body.max_tokens} and max_completion_tokens "
            f"{body.max_completion_tokens} differ; give one",
            param="max_tokens",
        )
