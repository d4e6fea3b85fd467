"""What OpenAI's client sends to get JSON, calls of tools and responses, and what it gets."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import pytest

pytest.importorskip("transformers")
for needed in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(needed)
httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")

import pydantic  # noqa: E402
from forked_engine import forked_engine  # noqa: E402
from server_models import Server, engine_config, running_server, tiny_tokenizer  # noqa: E402

BIAS = {str(tiny_tokenizer().convert_tokens_to_ids(mark)): 4.0 for mark in '"}],'}
HELLO = [{"role": "user", "content": "hello the "}]
CHAT: dict[str, Any] = {"model": "tiny", "messages": HELLO, "seed": 3, "logit_bias": BIAS}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 8},
                "unit": {"enum": ["C", "F"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}


class City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=10)
    size: Literal["small", "large"]
    rivers: list[Literal["Rhine", "Po"]] = pydantic.Field(max_length=3)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    engine = forked_engine(engine_config())
    with running_server(engine) as running:
        yield running
    engine.close()


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    return openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0)


def post(server: Server, body: Any, path: str = "/v1/chat/completions") -> Any:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60)


def test_parse_gives_the_model_it_was_asked_for(client: Any) -> None:
    answer = client.chat.completions.parse(**CHAT, response_format=City, n=3)
    for choice in answer.choices:
        assert isinstance(choice.message.parsed, City)
        assert choice.finish_reason == "stop"


def test_json_objects_and_streams_of_them(client: Any) -> None:
    wanted = {
        "type": "json_schema",
        "json_schema": {"name": "c", "schema": City.model_json_schema()},
    }
    with client.chat.completions.stream(**CHAT, response_format=City) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion().choices[0].message
    assert isinstance(streamed.parsed, City)
    whole = client.chat.completions.create(**CHAT, response_format=wanted)
    assert whole.choices[0].message.content == streamed.content
    bias = {"logit_bias": BIAS | {str(tiny_tokenizer().convert_tokens_to_ids("}")): 30.0}}
    made = client.chat.completions.create(
        **CHAT | bias, response_format={"type": "json_object"}, max_tokens=300
    )
    assert isinstance(json.loads(made.choices[0].message.content), dict)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": "[ab]{3}"}}, "[ab]{3}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_regex": "x{4}"}, "x{4}"),
        ({"guided_grammar": 'start: "a" "b"'}, "ab"),
        ({"guided_json": {"enum": [1, 2]}}, "[12]"),
        ({"structured_outputs": {"json": '{"const": true}'}}, "true"),
    ],
)
def test_forms_as_vllm_states_them(client: Any, fields: dict[str, Any], pattern: str) -> None:
    chat = client.chat.completions.create(**CHAT, extra_body=fields)
    assert re.fullmatch(pattern, chat.choices[0].message.content)
    plain = client.completions.create(model="tiny", prompt="hello", extra_body=fields)
    assert re.fullmatch(pattern, plain.choices[0].text)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"structured_outputs": {"regex": "(a"}}, "unclosed group"),
        ({"structured_outputs": {}}, "exactly one of"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "exactly one of"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "b"}}, "not both"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "not both"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {
                        "name": "x",
                        "schema": {"properties": {"a": {"items": {"not": {}}}}},
                    },
                }
            },
            "json.properties.a.items cannot be compiled",
        ),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice needs tools"),
        ({"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "'f'"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template"),
        ({"continue_final_message": True}, "of the assistant"),
        ({"messages": [{"role": "assistant"}]}, "messages.0.content"),
    ],
)
def test_what_cannot_be_is_a_400_that_says_where(
    server: Server, fields: dict[str, Any], message: str
) -> None:
    answer = post(server, CHAT | fields)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize("choice", ["required", "named"])
def test_calls_that_are_required_match_their_schema(client: Any, choice: str) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    wanted = {
        "tools": [NOW, WEATHER],
        "tool_choice": named if choice == "named" else "required",
        "parallel_tool_calls": choice == "required",
    }
    whole = client.chat.completions.create(**CHAT, **wanted).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.content is None
    for call in whole.message.tool_calls:
        arguments = json.loads(call.function.arguments)
        if call.function.name == "get_weather":
            assert set(arguments) == {"city", "unit"} and arguments["unit"] in ("C", "F")
    if choice == "named":
        assert [call.function.name for call in whole.message.tool_calls] == ["get_weather"]
    with client.chat.completions.stream(**CHAT, **wanted) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion().choices[0]
    made = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls]
    assert made == [
        (call.function.name, call.function.arguments) for call in streamed.message.tool_calls
    ]
    assert streamed.finish_reason == "tool_calls"


def test_a_loop_of_tools(client: Any) -> None:
    messages: list[Any] = list(HELLO)
    options: dict[str, Any] = {"model": "tiny", "seed": 5, "logit_bias": BIAS, "tools": [WEATHER]}
    asked = client.chat.completions.create(
        messages=messages, **options, tool_choice="required", parallel_tool_calls=False
    )
    message = asked.choices[0].message
    assert message.content is None
    messages.append(message)
    messages += [
        {"role": "tool", "tool_call_id": call.id, "content": "12 degrees"}
        for call in message.tool_calls
    ]
    answer = client.chat.completions.create(messages=messages, **options, max_tokens=8)
    assert answer.choices[0].message.role == "assistant"
    none = client.chat.completions.create(
        messages=messages, **options, tool_choice="none", max_tokens=8
    )
    assert none.choices[0].message.tool_calls is None


def test_messages_come_back_with_what_clients_keep_beside_them(server: Server) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    kept = {"provider_specific_fields": {"a": 1}, "annotations": [], "function_call": None}
    said = {"role": "assistant", "content": None, "tool_calls": [call]} | kept
    messages = [*HELLO, said, {"role": "tool", "tool_call_id": "1", "content": "12"}]
    assert post(server, CHAT | {"messages": messages, "max_tokens": 2}).status_code == 200
    unknown = [*HELLO, said | {"mood": "good"}]
    answer = post(server, CHAT | {"messages": unknown})
    assert answer.status_code == 400 and "mood" in answer.json()["error"]["message"]


def test_an_answer_is_continued(server: Server) -> None:
    body = {"model": "tiny", "temperature": 0, "max_tokens": 8, "return_token_ids": True}
    first = [*HELLO, {"role": "assistant", "content": "the the"}]
    answer = post(server, body | {"messages": first, "continue_final_message": True}).json()
    prompt = tiny_tokenizer().decode(answer["prompt_token_ids"])
    assert prompt.endswith("<assistant>the the")


def test_responses(client: Any) -> None:
    plain = client.responses.create(model="tiny", input="hello", max_output_tokens=8)
    assert plain.status == "incomplete" and plain.output_text
    assert plain.usage.output_tokens == 8
    parsed = client.responses.parse(model="tiny", input=HELLO, text_format=City)
    assert isinstance(parsed.output_parsed, City) and parsed.status == "completed"


def test_streams_of_responses(client: Any) -> None:
    with client.responses.stream(model="tiny", input="hello", max_output_tokens=8) as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "response.created" and kinds[-1] == "response.incomplete"
    assert "response.output_text.delta" in kinds
    with client.responses.stream(model="tiny", input="hello", text_format=City) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_response().output_parsed, City)


def test_tools_of_responses(client: Any) -> None:
    flat = {"type": "function", **WEATHER["function"]}
    options: dict[str, Any] = {"model": "tiny", "tools": [flat]}
    asked = client.responses.create(input="hello", tool_choice="required", **options)
    calls = [item for item in asked.output if item.type == "function_call"]
    assert calls and json.loads(calls[0].arguments)["unit"] in ("C", "F")
    items: list[Any] = [*HELLO, *(item.model_dump() for item in asked.output)]
    items += [
        {"type": "function_call_output", "call_id": call.call_id, "output": "12"} for call in calls
    ]
    answer = client.responses.create(input=items, max_output_tokens=4, **options)
    assert answer.usage.output_tokens == 4
    with client.responses.stream(input="hello", tool_choice="required", **options) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output[0].type == "function_call"


def test_nothing_is_kept(server: Server) -> None:
    body = {"model": "tiny", "input": "a", "previous_response_id": "resp_1"}
    answer = post(server, body, "/v1/responses")
    assert answer.status_code == 400 and "not kept" in answer.json()["error"]["message"]


def test_embeddings_say_why_not(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="no embeddings"):
        client.embeddings.create(model="tiny", input="a")
