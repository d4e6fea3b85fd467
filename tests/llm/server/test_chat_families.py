"""Tools, their answers and reasoning through the templates of model families, by HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

pytest.importorskip("transformers")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")
pytest.importorskip("jsonschema_rs")

import jsonschema_rs
from chat_families import ARGUMENTS, CHAT_FAMILIES, chat_model, chat_tokenizer, token_ids
from forked_engine import forked_engine
from server_models import Server, running_server

from anabranch.llm.engine.config import EngineConfig, SpeculativeConfig
from anabranch.llm.server.tool_format import FORMATS

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Basel", "Bern"]}, "day": {"enum": [1, 2]}},
    "required": ["city", "day"],
    "additionalProperties": False,
}
FUNCTION = {"name": "f", "parameters": PARAMETERS}
HI = [{"role": "user", "content": "hi"}]
CALL = {"id": "123456789", "type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}
CONVERSATION = [
    *HI,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "123456789", "content": "12"},
    {"role": "user", "content": "thanks"},
]


@pytest.fixture(scope="module", params=FORMATS)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def server(family: str) -> Iterator[Server]:
    drafts = SpeculativeConfig(min_ngram=1, adaptive=False)
    options: dict[str, Any] = {"device": "cpu", "max_num_seqs": 8, "seed": 0}
    engine = forked_engine(EngineConfig(model=chat_model(family), speculative=drafts, **options))
    with running_server(engine) as running:
        yield running
    engine.close()


def post(server: Server, **body: Any) -> Any:
    given = {"model": "tiny", "messages": HI, "seed": 1, "max_tokens": 200} | body
    answer = httpx.post(f"{server.v1}/chat/completions", json=given, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def prompt_of(family: str, answer: Any) -> str:
    return chat_tokenizer(family).decode(answer["prompt_token_ids"])


def assert_valid(calls: list[Any]) -> None:
    for call in calls:
        assert call["function"]["name"] == "f"
        assert jsonschema_rs.is_valid(PARAMETERS, json.loads(call["function"]["arguments"]))


def test_tools_go_through_the_template(server: Server, family: str) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    answer = post(server, tools=[tool], max_tokens=1, return_token_ids=True)
    prompt, wanted = prompt_of(family, answer), CHAT_FAMILIES[family].asked
    if FORMATS[family].around:  # its template has no place for tools
        assert prompt.endswith(wanted) and '"name": "f"' in prompt
    else:
        assert prompt == wanted


def test_calls_and_their_answers_go_through_the_template(server: Server, family: str) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    body = {"messages": CONVERSATION, "tools": [tool], "max_tokens": 1, "return_token_ids": True}
    assert prompt_of(family, post(server, **body)).endswith(CHAT_FAMILIES[family].answered)


@pytest.mark.parametrize("parallel", [False, True])
def test_required_calls(server: Server, family: str, parallel: bool) -> None:
    tools = [{"type": "function", "function": FUNCTION}]
    body = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": parallel}
    found = post(server, **body, n=3, logit_bias=ends_of_thoughts(family))["choices"]
    over = [choice for choice in found if choice["finish_reason"] != "length"]
    assert over if parallel else len(over) == 3
    for choice in over:
        assert choice["finish_reason"] == "tool_calls"
        assert_valid(calls_of(choice))
        assert parallel or len(calls_of(choice)) == 1


def test_calls_that_the_model_decides_on_are_strict(server: Server, family: str) -> None:
    """Text, and valid calls; drafts change nothing."""
    tools = [{"type": "function", "function": FUNCTION | {"strict": True}}]
    body = {"tools": tools, "logit_bias": marks_of_calls(family), "n": 8, "max_tokens": 300}
    choices = post(server, **body)["choices"]
    over = [choice for choice in choices if choice["finish_reason"] != "length"]
    calls = [call for choice in over for call in calls_of(choice)]
    assert calls
    assert_valid(calls)
    plain = post(server, **body, speculate=False)["choices"]
    assert [text_and_calls(c) for c in plain] == [text_and_calls(c) for c in choices]


def test_reasoning_comes_before_a_form(server: Server, family: str) -> None:
    chat = CHAT_FAMILIES[family]
    body: dict[str, Any] = {"structured_outputs": {"choice": ["yes", "no"]}}
    begin = "a" if family == "gpt-oss" else "<think>"  # a as in analysis
    likely = {str(token): 12.0 for token in token_ids(family, begin) if token is not None}
    body |= {"logit_bias": ends_of_thoughts(family) | likely, "n": 4}
    if family == "deepseek-v3.1":
        body["chat_template_kwargs"] = {"thinking": True}
    messages = [choice["message"] for choice in post(server, **body)["choices"]]
    assert {message["content"] for message in messages} <= {"yes", "no"}
    thoughts = [message.get("reasoning_content") for message in messages]
    assert any(thoughts) == ("<think>" in chat.marks or family == "gpt-oss")
    if family == "hermes":
        closed = {"chat_template_kwargs": {"enable_thinking": False}}
        for choice in post(server, **body | closed)["choices"]:
            assert not choice["message"].get("reasoning_content")


def calls_of(choice: Any) -> list[Any]:
    return choice["message"].get("tool_calls") or []


def text_and_calls(choice: Any) -> Any:
    functions = [call["function"] for call in calls_of(choice)]
    return choice["message"]["content"], functions, choice["message"].get("reasoning_content")


def ends_of_thoughts(family: str) -> dict[str, float]:
    mark = "<|end|>" if family == "gpt-oss" else "</think>"
    known = chat_tokenizer(family).get_vocab()
    return {str(known[mark]): 7.0} if mark in known else {}


def marks_of_calls(family: str) -> dict[str, float]:
    """Likely enough that some answers hold a call, after a text."""
    mark = "<|channel|>" if family == "gpt-oss" else FORMATS[family].first_mark
    tokens = token_ids(family, mark, CHAT_FAMILIES[family].ends[0])
    return ends_of_thoughts(family) | {str(token): 7.0 for token in tokens}
