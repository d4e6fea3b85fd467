"""Events of a streamed response, piece by piece."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

pydantic = pytest.importorskip("pydantic")

from anabranch.llm.server.answer_pieces import AnswerPiece, PieceKind  # noqa: E402
from anabranch.llm.server.responses import ResponseEvents  # noqa: E402


class Whole(pydantic.BaseModel):
    status: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None


def whole(status: str, items: Sequence[dict[str, Any]], usage: dict[str, Any] | None) -> Whole:
    return Whole(status=status, output=list(items), usage=usage)


def events_of(pieces: Sequence[tuple[PieceKind, str]]) -> list[dict[str, Any]]:
    """Of a whole answer."""
    events = ResponseEvents(whole)
    sent = [events.push(AnswerPiece(kind, text)) for kind, text in pieces]
    sent.append(events.finish("completed", {"total_tokens": 3}))
    found: list[dict[str, Any]] = []
    for block in b"".join(sent).decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def names_of(events: Sequence[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def test_reasoning_then_text() -> None:
    events = events_of(
        [(PieceKind.REASONING, "hm"), (PieceKind.TEXT, "a"), (PieceKind.TEXT, "b")],
    )
    begin, end = ["output_item.added", "content_part.added"], "output_item.done"
    assert names_of(events) == [
        *("created", "in_progress"),
        *(*begin, "reasoning_text.delta", "reasoning_text.done", "content_part.done", end),
        *(*begin, "output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", end, "completed"),
    ]
    assert {event["content_index"] for event in events if "content_index" in event} == {0}
    assert [event["type"] for event in events if "logprobs" in event] == [
        *["response.output_text.delta"] * 2,
        "response.output_text.done",
    ]
    assert [event.get("output_index") for event in events[2:8]] == [0] * 6
    assert [event.get("output_index") for event in events[8:-1]] == [1] * 7
    thought, message = (event["item"] for event in events if event["type"].endswith(end))
    assert "status" not in thought
    assert thought["content"][0]["text"] == "hm"
    assert message["status"] == "completed"
    assert message["content"][0] == {
        "type": "output_text",
        "text": "ab",
        "annotations": [],
        "logprobs": [],
    }
    added = next(e for e in events[8:] if e["type"].endswith("item.added"))
    assert added["item"]["status"] == "in_progress"
    assert events[-1]["response"]["output"] == [thought, message]


def test_two_calls() -> None:
    events = events_of(
        [
            (PieceKind.CALL, "find"),
            (PieceKind.ARGUMENTS, '{"a"'),
            (PieceKind.ARGUMENTS, ": 1}"),
            (PieceKind.CALL, "find"),
            (PieceKind.ARGUMENTS, "{}"),
        ],
    )
    delta, done = "function_call_arguments.delta", "function_call_arguments.done"
    assert names_of(events) == [
        *("created", "in_progress"),
        *("output_item.added", delta, delta, done, "output_item.done"),
        *("output_item.added", delta, done, "output_item.done"),
        "completed",
    ]
    first, second = (e["item"] for e in events if e["type"].endswith("output_item.done"))
    assert [first["arguments"], second["arguments"]] == ['{"a": 1}', "{}"]
    assert first["status"] == second["status"] == "completed"
    assert first["id"] != second["id"]
    assert first["call_id"] != second["call_id"]
    assert [e["arguments"] for e in events if e["type"].endswith(done)] == ['{"a": 1}', "{}"]


def test_nothing() -> None:
    assert names_of(events_of([])) == ["created", "in_progress", "completed"]
