"""`/v1/responses`: the newer of OpenAI's two protocols for chats. Nothing is kept."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ValidationError

from anabranch.llm.server.answer import Answer
from anabranch.llm.server.answer_forms import new_call_id
from anabranch.llm.server.answer_pieces import AnswerPiece, PieceKind
from anabranch.llm.server.chat_job import ChatJob
from anabranch.llm.server.deltas import RequestDelta
from anabranch.llm.server.errors import REFUSALS, refused
from anabranch.llm.server.openai_fields import Usage
from anabranch.llm.server.reply import new_head
from anabranch.llm.server.response_models import ResponseObject, ResponseRequest
from anabranch.llm.server.service import Service, service_of

_PARTS = {PieceKind.TEXT: "output_text", PieceKind.REASONING: "reasoning_text"}
Whole = Callable[[str, Sequence[dict[str, Any]], dict[str, Any] | None], BaseModel]
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
        self._head = new_head("resp", service.model_name)
        try:
            chat = body.chat()
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise refused("input", f"input: {first['msg']} (at {place})") from None
        self._job = ChatJob(service, chat)
        self._events = ResponseEvents(self._object)
        self._reason: str | None = None
        self.streams = bool(body.stream)
        self.num_chars, self.params = self._job.num_chars, self._job.params

    def encode(self) -> list[list[int]]:
        prompt = self._job.encode()
        self.params = self._job.params
        self._writer = self._job.writer()
        return [prompt]

    def events(self, place: int, delta: RequestDelta) -> bytes:
        written = b""
        for choice in delta.choices:
            self._reason = choice.finish_reason
            final = choice.finish_reason is not None
            for piece in self._writer.pieces(choice.text, final=final):
                written += self._events.push(piece)
        return written

    def last_events(self, usage: Usage) -> bytes:
        """The end of the last item, and the whole answer."""
        return self._events.finish(self._status(), _counts(usage))

    def whole(self, deltas: Sequence[RequestDelta], usage: Usage) -> BaseModel:
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
            id=self._head["id"],
            object="response",
            created_at=self._head["created"],
            status=status,
            model=self._head["model"],
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


class ResponseEvents:
    """Numbers events, and keeps the items; `whole` makes the response of a status and items."""

    def __init__(self, whole: Whole) -> None:
        self.items: list[dict[str, Any]] = []
        self._whole = whole
        self._kind: PieceKind | None = None  # of the item that grows
        self._number = 0

    def push(self, piece: AnswerPiece) -> bytes:
        events = b"" if self._number else self._begin()
        kind = PieceKind.CALL if piece.kind is PieceKind.ARGUMENTS else piece.kind
        if piece.kind is not PieceKind.ARGUMENTS and (
            kind is not self._kind or kind is PieceKind.CALL
        ):
            events += self._end_item() + self._begin_item(kind, piece.text)
        if piece.kind is PieceKind.CALL:
            return events
        item = self.items[-1]
        if kind is PieceKind.CALL:
            item["arguments"] += piece.text
            return events + self._event("function_call_arguments.delta", delta=piece.text)
        item["content"][0]["text"] += piece.text
        name = f"{_PARTS[kind]}.delta"
        more: dict[str, Any] = {"logprobs": []} if kind is PieceKind.TEXT else {}
        return events + self._event(name, content_index=0, delta=piece.text, **more)

    def finish(self, status: str, usage: dict[str, Any]) -> bytes:
        """The end of the last item and of the response."""
        events = b"" if self._number else self._begin()
        events += self._end_item()
        whole = self._whole(status, self.items, usage)
        return events + self._write(f"response.{status}", response=whole.model_dump())

    def _begin(self) -> bytes:
        begun = self._whole("in_progress", [], None).model_dump()
        created = self._write("response.created", response=begun)
        return created + self._write("response.in_progress", response=begun)

    def _begin_item(self, kind: PieceKind, text: str) -> bytes:
        self._kind = kind
        self.items.append(_new_item(kind, text))
        events = self._write(
            "response.output_item.added", output_index=len(self.items) - 1, item=self.items[-1]
        )
        if kind is not PieceKind.CALL:
            part = {"type": _PARTS[kind], "text": ""}
            part |= {"annotations": [], "logprobs": []} if kind is PieceKind.TEXT else {}
            events += self._event("content_part.added", content_index=0, part=part)
            self.items[-1]["content"].append(part)
        return events

    def _end_item(self) -> bytes:
        if self._kind is None:
            return b""
        item, kind = self.items[-1], self._kind
        self._kind = None
        if kind is not PieceKind.REASONING:
            item["status"] = "completed"
        if kind is PieceKind.CALL:
            arguments = item["arguments"]
            events = self._event("function_call_arguments.done", arguments=arguments)
        else:
            part = item["content"][0]
            more: dict[str, Any] = {"logprobs": []} if kind is PieceKind.TEXT else {}
            name = f"{_PARTS[kind]}.done"
            events = self._event(name, content_index=0, text=part["text"], **more)
            events += self._event("content_part.done", content_index=0, part=part)
        last = len(self.items) - 1
        return events + self._write("response.output_item.done", output_index=last, item=item)

    def _event(self, name: str, **fields: Any) -> bytes:
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return self._write(f"response.{name}", **place, **fields)

    def _write(self, name: str, **fields: Any) -> bytes:
        event = {"type": name, "sequence_number": self._number} | fields
        self._number += 1
        return f"event: {name}\ndata: {json.dumps(event)}\n\n".encode()


def _new_item(kind: PieceKind, text: str) -> dict[str, Any]:
    """An item that has just begun; of a call, `text` is the name."""
    number = secrets.token_hex(12)
    if kind is PieceKind.CALL:
        head = {"id": f"fc_{number}", "type": "function_call", "call_id": f"call_{new_call_id()}"}
        return head | {"name": text, "arguments": "", "status": "in_progress"}
    if kind is PieceKind.REASONING:
        return {"id": f"rs_{number}", "type": "reasoning", "summary": [], "content": []}
    head = {"id": f"msg_{number}", "type": "message", "role": "assistant"}
    return head | {"status": "in_progress", "content": []}
