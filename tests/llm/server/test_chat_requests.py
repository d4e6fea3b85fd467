"""Bodies of responses and rules of forms, as the chat and the parameters they become."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("transformers")
for needed in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(needed)

from anabranch.llm.server.completion_models import CompletionRequest  # noqa: E402
from anabranch.llm.server.errors import ApiError  # noqa: E402
from anabranch.llm.server.response_models import InputItem, ResponseRequest  # noqa: E402

PARTS = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
CALL = {"name": "f", "arguments": "{}"}
MESSAGES: list[tuple[dict[str, Any], dict[str, Any] | None]] = [
    ({"content": "x"}, {"role": "user", "content": "x"}),
    ({"role": "assistant", "content": "x"}, {"role": "assistant", "content": "x"}),
    ({"type": "message", "role": "user", "content": PARTS}, {"role": "user", "content": "ab"}),
    ({"type": "reasoning", "content": None}, None),
    (
        {"type": "function_call", "name": "f", "call_id": "c", "arguments": '{"a": 1}'},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "c",
                    "type": "function",
                    "function": {"name": "f", "arguments": '{"a": 1}'},
                }
            ],
        },
    ),
    (
        {"type": "function_call", "name": "f"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call", "type": "function", "function": CALL}],
        },
    ),
    (
        {"type": "function_call_output", "call_id": "c", "output": "12"},
        {"role": "tool", "content": "12", "tool_call_id": "c"},
    ),
    (
        {"type": "function_call_output", "call_id": "c"},
        {"role": "tool", "content": "", "tool_call_id": "c"},
    ),
]


@pytest.mark.parametrize(("item", "message"), MESSAGES)
def test_items_are_messages(item: dict[str, Any], message: dict[str, Any] | None) -> None:
    assert InputItem.model_validate(item).message() == message


def chat_of(**body: Any) -> dict[str, Any]:
    found = ResponseRequest.model_validate({"input": "x"} | body).chat()
    return found.model_dump(exclude_unset=True)


USER = {"role": "user", "content": "x"}
TOOL = {"type": "function", "name": "f", "description": None, "parameters": {"type": "object"}}
OFFERED = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("body", "chat"),
    [
        ({}, {"parallel_tool_calls": True}),
        ({"parallel_tool_calls": False}, {"parallel_tool_calls": False}),
        ({"max_output_tokens": 3, "temperature": 0.0}, {"max_tokens": 3, "temperature": 0.0}),
        ({"top_p": 0.5, "seed": 7}, {"top_p": 0.5, "seed": 7}),
        ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"background": False}, {}),
        (
            {"tools": [TOOL], "tool_choice": "required"},
            {"tools": [OFFERED], "tool_choice": "required"},
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}},
            {
                "tools": [OFFERED],
                "tool_choice": {"type": "function", "function": {"name": "f"}},
            },
        ),
        ({"text": {"format": {"type": "text"}}}, {"response_format": {"type": "text"}}),
        ({"text": {"verbosity": "low"}}, {}),
        (
            {"text": {"format": {"type": "json_object"}}},
            {"response_format": {"type": "json_object"}},
        ),
    ],
)
def test_responses_are_chats(body: dict[str, Any], chat: dict[str, Any]) -> None:
    found = chat_of(**body)
    assert found.pop("messages") == [USER]
    assert found == {"parallel_tool_calls": True} | chat


@pytest.mark.parametrize(("name", "called"), [(None, "answer"), ("city", "city")])
@pytest.mark.parametrize("schema", [None, SCHEMA])
def test_schemas_have_names(name: str | None, called: str, schema: Any) -> None:
    form = {"type": "json_schema", "name": name, "schema": schema}
    body = ResponseRequest.model_validate({"input": "x", "text": {"format": form}})
    assert body.text is not None and body.text.format is not None
    assert body.text.format.response_format() == {
        "type": "json_schema",
        "json_schema": {"name": called, "schema": schema or {}},
    }


def test_instructions_come_first() -> None:
    system = {"role": "system", "content": "Be brief."}
    assert chat_of(instructions="Be brief.")["messages"] == [system, USER]
    assert chat_of(instructions="")["messages"] == [USER]
    items = [{"content": "x"}, {"type": "reasoning"}]
    assert chat_of(input=items, instructions="Be brief.")["messages"] == [system, USER]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"previous_response_id": "r"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
    ],
)
def test_what_responses_do_not_have(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        chat_of(**body)
    assert (refused.value.status_code, refused.value.param) == (400, param)
    assert refused.value.code == "unsupported"


@pytest.mark.parametrize(
    ("body", "rules"),
    [
        ({}, {"bad_words": ()}),
        ({"bad_words": ["flood"]}, {"bad_words": ("flood",)}),
        ({"allowed_token_ids": [5]}, {"bad_words": (), "allowed_token_ids": (5,)}),
        ({"guided_regex": "a+"}, {"bad_words": (), "form": "a+"}),
        ({"structured_outputs": {"regex": "a+"}}, {"bad_words": (), "form": "a+"}),
    ],
)
def test_rules_of_an_answer(body: dict[str, Any], rules: dict[str, Any]) -> None:
    request = CompletionRequest(prompt="x", **body)
    params = request.sampling_params({}, **request.rules())
    assert params.bad_words == rules["bad_words"]
    assert params.allowed_token_ids == rules.get("allowed_token_ids")
    form = params.structured_outputs
    assert (form and form.regex) == rules.get("form")


EMPTY = {"type": "object"}
OBJECT = {"response_format": {"type": "json_object"}}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "guided fields, not both"),
        (OBJECT | {"guided_regex": "a"}, "response_format or structured_outputs, not both"),
    ],
)
def test_one_form_at_a_time(body: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        CompletionRequest(prompt="x", **body).rules()


def test_forms_of_json() -> None:
    form = CompletionRequest(prompt="x", **OBJECT).form()
    assert form is not None and form.json_object
    for schema in (None, SCHEMA):
        wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        form = CompletionRequest(prompt="x", response_format=wanted).form()  # type: ignore[arg-type]
        assert form is not None and json.loads(form.json or "") == (schema or EMPTY)
    assert CompletionRequest(prompt="x").form() is None
