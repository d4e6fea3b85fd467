"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from anabranch.llm.sampling.token_logprobs import TokenLogprobs
from anabranch.llm.server.answer import Answer
from anabranch.llm.server.answer_forms import MessageWriter
from anabranch.llm.server.chat_job import ChatJob
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
from anabranch.llm.server.errors import REFUSALS, refused
from anabranch.llm.server.openai_fields import Usage
from anabranch.llm.server.reply import SampledReply, event_of, written
from anabranch.llm.server.service import Service, service_of

NOT_YET: dict[str, Any] = {"logprobs": None, "finish_reason": None}  # of a chunk before the last
router = APIRouter()


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=REFUSALS)
async def create_chat_completion(request: Request, body: ChatRequest) -> Response:
    """Continue a conversation."""
    service = service_of(request)
    service.check_model(body.model)
    return Answer(service, ChatReply(service, body))


class ChatReply(SampledReply[ChatRequest]):
    """A conversation is one prompt, by the model's chat template."""

    num_prompts = 1

    def __init__(self, service: Service, body: ChatRequest) -> None:
        super().__init__(service, body, "chatcmpl")
        _refuse(body)
        self._greeted: set[int] = set()
        self._prompt: list[int] = []
        self._job = ChatJob(service, body)
        self._writers: dict[int, MessageWriter] = {}
        self.num_chars, self.params = self._job.num_chars, self._job.params

    def encode(self) -> list[list[int]]:
        self._prompt = self._job.encode()
        self.params = self._job.params
        if (wanted := self._body.prompt_logprobs) is not None:
            self._refuse_many_logprobs([self._prompt], wanted + 1)
        return [self._prompt]

    def _writer(self, number: int) -> MessageWriter:
        if number not in self._writers:
            self._writers[number] = self._job.writer()
        return self._writers[number]

    def events(self, place: int, delta: RequestDelta) -> bytes:
        """Chunks for each answer that has new text, after a first one with the role."""
        return b"".join(
            self._greeting(each, delta) + self._events(each, delta) for each in delta.choices
        )

    def _greeting(self, choice: ChoiceDelta, delta: RequestDelta) -> bytes:
        if choice.number in self._greeted:
            return b""
        self._greeted.add(choice.number)
        hello = {"role": "assistant", "content": ""}
        usage = self._chunk_usage(choice.number, self._prompt, 0, delta.num_cached_tokens)
        return event_of(self._chunk(hello, choice.number, usage, **NOT_YET))

    def _events(self, choice: ChoiceDelta, delta: RequestDelta) -> bytes:
        """A chunk for each new piece; the last also has what belongs to the tokens."""
        number, writer, final = choice.number, self._writer(choice.number), choice.finish_reason
        if writer.is_plain and self._sends_only_text and final is None:
            return self._text_events.event(number, choice.text, self._text_chunk)
        said = writer.deltas(choice.text, final=final is not None)
        if not said and self._sends_only_text and final is None:
            return b""
        num_tokens, num_cached = len(choice.token_ids), delta.num_cached_tokens
        usage = self._chunk_usage(number, self._prompt, num_tokens, num_cached)
        *first, last = said or [{}]
        chunks = [self._chunk(each, number, usage, **NOT_YET) for each in first]
        chunks.append(self._chunk(last, number, usage, **self._details(choice)))
        return b"".join(map(event_of, chunks))

    def _text_chunk(self, index: int, text: str) -> ChatChunk:
        usage = self._chunk_usage(index, self._prompt, 0, 0)
        return self._chunk({"content": text}, index, usage, **NOT_YET, stop_reason=None)

    def _chunk(
        self, said: dict[str, Any], index: int, usage: dict[str, Usage | None], **details: Any
    ) -> ChatChunk:
        message = AssistantMessage.model_validate(said)
        choice = ChatChunkChoice(index=index, delta=message, **details)
        named: dict[str, Any] = {**self._head, **usage}
        return ChatChunk(object="chat.completion.chunk", choices=[choice], **named)

    def last_events(self, usage: Usage) -> bytes:
        if not self._body.includes_usage:
            return b""
        return event_of(
            ChatChunk(object="chat.completion.chunk", choices=[], usage=usage, **self._head)
        )

    def whole(self, deltas: Sequence[RequestDelta], usage: Usage) -> BaseModel:
        (delta,) = deltas
        choices = [
            ChatChoice(
                index=choice.number,
                message=self._writer(choice.number).whole(choice.text),
                **self._details(choice),
            )
            for choice in delta.choices
        ]
        extras: dict[str, Any] = {}
        if delta.prompt_logprobs is not None:
            extras["prompt_logprobs"] = self._prompt_logprobs(delta.prompt_logprobs)
        if self._body.return_token_ids:
            extras["prompt_token_ids"] = self._prompt
        return ChatCompletion(
            object="chat.completion", choices=choices, usage=usage, **self._head, **extras
        )

    def _details(self, choice: ChoiceDelta) -> dict[str, Any]:
        details: dict[str, Any] = {
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if choice.finish_reason == "stop" and self._writer(choice.number).num_calls:
            details["finish_reason"] = "tool_calls"
        if self._body.logprobs:
            pairs = zip(choice.token_ids, choice.logprobs, strict=True)
            content = [self._logprob(token, entry) for token, entry in pairs]
            details["logprobs"] = ChatLogprobs(content=content)
        return details | self._token_fields(0, choice)

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
        raise refused("top_logprobs", "top_logprobs needs logprobs: true")
    first, second = body.max_tokens, body.max_completion_tokens
    if None not in (first, second) and first != second:
        message = f"max_tokens {first} and max_completion_tokens {second} differ; give one"
        raise refused("max_tokens", message)
