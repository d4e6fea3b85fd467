"""Events of a response that is streamed: items that begin, grow and end."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import BaseModel

from anabranch.llm.server.answer_pieces import AnswerPiece, PieceKind
from anabranch.llm.server.chat_message import new_call_id

_PARTS = {PieceKind.TEXT: "output_text", PieceKind.REASONING: "reasoning_text"}
Whole = Callable[[str, Sequence[dict[str, Any]], dict[str, Any] | None], BaseModel]


class ResponseEvents:
    """Numbers events, and keeps the items; `whole` makes the response of a status and items."""

    def __init__(self, whole: Whole) -> None:
        self.items: list[dict[str, Any]] = []
        self._whole = whole
        self._kind: PieceKind | None = None  # of the item that grows
        self._number = 0

    def push(self, piece: AnswerPiece) -> bytes:
        """Something new of the answer."""
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
        """Of the item that grows."""
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
