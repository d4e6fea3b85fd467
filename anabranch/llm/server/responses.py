"""`/v1/responses`: the newer of OpenAI's two protocols for chats. Nothing is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ValidationError

from anabranch.llm.server.answer import Answer
from anabranch.llm.server.answer_pieces import AnswerPiece, PieceKind
from anabranch.llm.server.chat_job import ChatJob
from anabranch.llm.server.chat_message import MessageWriter
from anabranch.llm.server.deltas import RequestDelta
from anabranch.llm.server.errors import REFUSALS, ApiError
from anabranch.llm.server.protocol import Usage
from anabranch.llm.server.reply import Head
from anabranch.llm.server.response_events import ResponseEvents
from anabranch.llm.server.response_models import ResponseObject, ResponseRequest
from anabranch.llm.server.service import Service, service_of

router = APIRouter()


@router.post("/v1/responses", response_model=ResponseObject, responses=REFUSALS)
async def create_response(request: Request, body: ResponseRequest) -> Response:
    """Answer a conversation."""
    service = service_of(request)
    service.check_model(body.model)
    return Answer(service, ResponseReply(service, body))


class ResponseReply:
    """One answer, as items: reasoning, a message, calls of functions."""

    num_prompts = 1

    def __init__(self, service: Service, body: ResponseRequest) -> None:
        self._body = body
        self._head = Head("resp", service.model_name)
        try:
            chat = body.chat()
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise ApiError(400, f"input: {first['msg']} (at {place})", param="input") from None
        self._job = ChatJob(service, chat)
        self._writer: MessageWriter | None = None
        self._events = ResponseEvents(self._object)
        self._reason: str | None = None
        self.streams = bool(body.stream)
        self.num_chars, self.params = self._job.num_chars, self._job.params

    def encode(self) -> list[list[int]]:
        """Tokens of the conversation."""
        prompt = self._job.encode()
        self.params = self._job.params
        parser = self._job.parser()
        self._writer = None if parser is None else MessageWriter(parser, self._job.shown)
        return [prompt]

    def events(self, place: int, delta: RequestDelta) -> bytes:
        """Of what is new."""
        written = b""
        for choice in delta.choices:
            self._reason = choice.finish_reason
            for piece in self._pieces(choice.text, final=choice.finish_reason is not None):
                written += self._events.push(piece)
        return written

    def _pieces(self, text: str, *, final: bool) -> list[AnswerPiece]:
        if self._writer is not None:
            return self._writer.pieces(text, final=final)
        return [AnswerPiece(PieceKind.TEXT, text)] if text else []

    def last_events(self, usage: Usage) -> bytes:
        """The end of the last item, and the whole answer."""
        return self._events.finish(self._status(), _counts(usage))

    def whole(self, deltas: Sequence[RequestDelta], usage: Usage) -> BaseModel:
        """All items."""
        self.events(0, deltas[0])
        self._events.finish(self._status(), _counts(usage))
        return self._object(self._status(), self._events.items, _counts(usage))

    def _status(self) -> str:
        return "incomplete" if self._reason == "length" else "completed"

    def _object(
        self, status: str, items: Sequence[dict[str, Any]], usage: dict[str, Any] | None
    ) -> ResponseObject:
        body = self._body
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
        wanted = body.text.model_dump(by_alias=True, exclude_none=True) if body.text else None
        return ResponseObject(
            id=self._head.id,
            object="response",
            created_at=self._head.created,
            status=status,
            model=self._head.model,
            output=list(items),
            usage=usage,
            error=None,
            incomplete_details=cut,
            instructions=body.instructions,
            metadata=body.metadata or {},
            parallel_tool_calls=body.parallel_tool_calls is not False,
            temperature=self.params.temperature,
            top_p=self.params.top_p,
            tool_choice=body.tool_choice if isinstance(body.tool_choice, str) else "auto",
            tools=tools,
            text=wanted or {"format": {"type": "text"}},
            max_output_tokens=body.max_output_tokens,
            previous_response_id=None,
            store=False,
        )


def _counts(usage: Usage) -> dict[str, Any]:
    cached = usage.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.total_tokens,
    }
