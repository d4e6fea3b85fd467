"""Answers of completions and chats, written from deltas without an engine."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("transformers")
for needed in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(needed)

from server_models import tiny_tokenizer  # noqa: E402

from anabranch.llm.sampling.token_logprobs import Logprob  # noqa: E402
from anabranch.llm.server.answer_forms import make_answer_forms  # noqa: E402
from anabranch.llm.server.answer_pieces import ChannelParser, ReasoningParser  # noqa: E402
from anabranch.llm.server.chat import ChatReply  # noqa: E402
from anabranch.llm.server.chat_models import ChatRequest, Message  # noqa: E402
from anabranch.llm.server.completion_models import CompletionRequest  # noqa: E402
from anabranch.llm.server.completions import CompletionReply  # noqa: E402
from anabranch.llm.server.deltas import ChoiceDelta, RequestDelta  # noqa: E402
from anabranch.llm.server.errors import ApiError  # noqa: E402
from anabranch.llm.server.messages import Ready, ServedEngine  # noqa: E402
from anabranch.llm.server.reply import count_usage  # noqa: E402
from anabranch.llm.server.response_models import ResponseRequest  # noqa: E402
from anabranch.llm.server.responses import ResponseReply  # noqa: E402
from anabranch.llm.server.server_limits import ServerLimits  # noqa: E402
from anabranch.llm.server.service import Service, make_service  # noqa: E402
from anabranch.llm.server.tool_format import GPT_OSS  # noqa: E402
from anabranch.llm.server.tool_parser import ToolParser  # noqa: E402

TOKENIZER = tiny_tokenizer()
SPECIAL = TOKENIZER.eos_token_id
A, B, C, D = (TOKENIZER.convert_tokens_to_ids(letter) for letter in "abcd")


def name_of(value: object) -> str:
    """Of a parameter: the same in every process, which an address is not."""
    return getattr(value, "__name__", str(value))


def service_of(**defaults: Any) -> Service:
    info = Ready("tiny", TOKENIZER, len(TOKENIZER), 1024, 4, 64, 16, 0, "cpu", defaults)
    engine = cast("ServedEngine", SimpleNamespace(info=info, num_restarts=0))
    return make_service(engine, limits=ServerLimits(), model_name=None, created=0)


SERVICE = service_of()


def completion(prompt: Any = "ab", **options: Any) -> CompletionReply:
    return CompletionReply(SERVICE, CompletionRequest(prompt=prompt, **options))


def chat(**options: Any) -> ChatReply:
    body = {"messages": [{"role": "user", "content": "a"}]} | options
    return ChatReply(SERVICE, ChatRequest.model_validate(body))


def entry(*tokens: int) -> dict[int, Logprob]:
    """The likeliest first."""
    return {token: Logprob(-float(rank), rank) for rank, token in enumerate(tokens, 1)}


def choice(text: str, number: int = 0, finish: str | None = None, **more: Any) -> ChoiceDelta:
    ids = TOKENIZER(text)["input_ids"]
    fields = {
        "token_ids": ids,
        "origins": [0, 1, 2, 0, 0, 0][: len(ids)],
        "steps": list(range(7, 7 + len(ids))),
        "logprobs": [],
        "stop_reason": None,
    }
    return ChoiceDelta(number=number, text=text, finish_reason=finish, **(fields | more))


def delta(*choices: ChoiceDelta, cached: int = 0, prompt: Any = None) -> RequestDelta:
    return RequestDelta("r", list(choices), False, cached, prompt)


def parsed(events: bytes) -> list[dict[str, Any]]:
    blocks = events.decode().split("\n\n")
    assert blocks.pop() == ""
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def usage(prompt: int, output: int, cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def test_choices_are_numbered_by_prompt_and_continuation() -> None:
    reply = completion(["ab", "c"], n=2, stream=True)
    assert (reply.num_prompts, reply.num_chars, reply.streams) == (2, 3, True)
    reply.encode()
    found = [
        event["choices"][0]
        for place in (0, 1)
        for text, finish in (("a", None), ("b", None), ("c", "stop"))
        for event in parsed(
            reply.events(place, delta(choice(text, 0, finish), choice(text, 1, finish)))
        )
    ]
    assert [(each["index"], each["text"], each["finish_reason"]) for each in found] == [
        (index, text, finish)
        for pair in ((0, 1), (2, 3))
        for text, finish in (("a", None), ("b", None), ("c", "stop"))
        for index in pair
    ]
    assert all(each["logprobs"] is None and each["stop_reason"] is None for each in found)
    assert not any("token_ids" in each or "token_origins" in each for each in found)
    assert reply.last_events(count_usage([[A]], 1, 0)) == b""


STREAMED: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "without": ({}, [None] * 3),
    "at the end": ({"include_usage": True}, [None] * 3),
    "all along": (
        {"include_usage": True, "continuous_usage_stats": True},
        [usage(2, 1, 1), usage(2, 2, 1), usage(2, 4, 1)],
    ),
    "all along, but not at the end": (
        {"include_usage": False, "continuous_usage_stats": True},
        [None] * 3,
    ),
}


@pytest.mark.parametrize("name", STREAMED)
@pytest.mark.parametrize("make", [completion, chat])
def test_tokens_are_counted_as_asked(make: Any, name: str) -> None:
    options, counts = STREAMED[name]
    reply = make(stream=True, stream_options=options)
    prompts = reply.encode()
    deltas = [("a", None), ("b", None), ("cd", "length")]
    sent = [
        event
        for text, finish in deltas
        for event in parsed(reply.events(0, delta(choice(text, 0, finish), cached=1)))
    ]
    if make is chat:
        greeting = sent.pop(0)
        assert greeting["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert greeting["choices"][0]["finish_reason"] is None
        expected = usage(len(prompts[0]), 0, 1) if counts[0] else None
        assert greeting.get("usage") == expected
    assert len(sent) == 3
    more = len(prompts[0]) - 2  # than the prompt of the completion
    for event, count in zip(sent, counts, strict=True):
        assert ("usage" in event) == options.get("include_usage", False)
        expected = count and usage(2 + more, count["completion_tokens"], 1)
        assert event.get("usage") == expected
    last = parsed(reply.last_events(count_usage(prompts, 4, 1)))
    if options.get("include_usage"):
        assert [(event["choices"], event["usage"]) for event in last] == [
            ([], usage(2 + more, 4, 1))
        ]
    else:
        assert last == []


def test_an_echo_without_a_completion_counts_no_output() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    reply = completion(max_tokens=0, echo=True, stream=True, stream_options=options, min_tokens=3)
    assert (reply.params.max_tokens, reply.params.min_tokens) == (1, 0)
    prompts = reply.encode()
    (event,) = parsed(reply.events(0, delta(choice("c", finish="stop"))))
    assert event["usage"] == usage(2, 0, 0)
    written = event["choices"][0]
    assert (written["text"], written["finish_reason"]) == ("ab", "length")
    (last,) = parsed(reply.last_events(count_usage(prompts, 1, 0)))
    assert last["usage"] == usage(2, 0, 0)
    whole: Any = reply.whole([delta(choice("c"))], count_usage(prompts, 1, 0))
    assert whole.usage.model_dump() == usage(2, 0, 0)


def test_a_completion_of_one_token_counts_it() -> None:
    reply = completion(max_tokens=1, echo=True)
    assert (reply.params.max_tokens, reply.params.min_tokens) == (1, 0)
    prompts = reply.encode()
    whole: Any = reply.whole([delta(choice("c", finish="length"))], count_usage(prompts, 1, 0))
    assert whole.choices[0].text == "abc"
    assert whole.usage.model_dump() == usage(2, 1, 0)


@pytest.mark.parametrize(
    ("options", "each"),
    [
        ({}, None),
        ({"logprobs": 2}, None),
        ({"prompt_logprobs": 1}, 1),
        ({"echo": True}, None),
        ({"echo": True, "logprobs": 2}, 2),
        ({"echo": True, "logprobs": 0}, 0),
        ({"echo": True, "logprobs": 1, "prompt_logprobs": 3}, 3),
        ({"echo": True, "logprobs": 3, "prompt_logprobs": 1}, 3),
    ],
)
def test_echoes_with_logprobs_need_those_of_the_prompt(
    options: dict[str, Any], each: int | None
) -> None:
    assert completion(**options).params.prompt_logprobs == each


def test_an_echo_has_the_logprobs_of_the_prompt() -> None:
    reply = completion(echo=True, logprobs=1, stream=True, n=2)
    reply.encode()
    of_prompt = [None, entry(B, C)]
    first = delta(
        choice("c", 0, logprobs=[entry(D, A, C)]),
        choice("d", 1, logprobs=[entry(D)]),
        prompt=of_prompt,
    )
    later = delta(choice("da", 0, "stop", logprobs=[entry(D, A), entry(C, A)]))
    found = [
        event["choices"][0] for each in (first, later) for event in parsed(reply.events(0, each))
    ]
    assert [each["text"] for each in found] == ["abc", "abd", "da"]
    assert found[0]["logprobs"] == {
        "tokens": ["a", "b", "c"],
        "token_logprobs": [None, -1.0, -3.0],
        "top_logprobs": [None, {"b": -1.0}, {"d": -1.0, "c": -3.0}],
        "text_offset": [0, 1, 2],
    }
    assert found[1]["logprobs"]["tokens"] == ["a", "b", "d"]
    assert found[2]["logprobs"] == {
        "tokens": ["d", "a"],
        "token_logprobs": [-1.0, -2.0],
        "top_logprobs": [{"d": -1.0}, {"c": -1.0, "a": -2.0}],
        "text_offset": [3, 4],
    }


def test_no_alternatives_are_listed_unless_asked_for() -> None:
    reply = completion(logprobs=0)
    prompts = reply.encode()
    said = delta(choice("a", logprobs=[entry(D, A)]))
    whole: Any = reply.whole([said], count_usage(prompts, 1, 0))
    assert whole.choices[0].logprobs.top_logprobs == [{"a": -2.0}]


def test_a_prompt_is_echoed_as_it_was_given_or_as_it_was_cut() -> None:
    for prompt, options, echoed in (
        ("ab<user>c", {}, "ab<user>c"),
        ("ab<user>c", {"truncate_prompt_tokens": 2}, "<user>c"),
        ([A, SPECIAL], {}, "a<end>"),
    ):
        reply = completion(prompt, echo=True, **options)
        prompts = reply.encode()
        whole: Any = reply.whole([delta(choice("d"))], count_usage(prompts, 1, 0))
        assert whole.choices[0].text == echoed + "d"


@pytest.mark.parametrize("skips", [None, True, False])
@pytest.mark.parametrize("make", [completion, chat])
def test_origins_leave_special_tokens_out_as_the_text_does(make: Any, skips: bool | None) -> None:
    reply = make(return_token_origins=True, skip_special_tokens=skips, stream=True)
    prompts = reply.encode()
    tokens = [A, SPECIAL, B]
    said = choice("ab", token_ids=tokens, origins=[0, 1, 2], steps=[3, 4, 4])
    end = "<end>" if skips is False else ""
    expected = [
        {"id": A, "text": "a", "origin": "sampled", "step": 3, "logprob": None},
        {"id": SPECIAL, "text": end, "origin": "accepted", "step": 4, "logprob": None},
        {"id": B, "text": "b", "origin": "corrected", "step": 4, "logprob": None},
    ]
    assert parsed(reply.events(0, delta(said)))[-1]["choices"][0]["token_origins"] == expected
    whole: Any = reply.whole([delta(said)], count_usage(prompts, 3, 0))
    assert [each.model_dump() for each in whole.choices[0].token_origins] == expected
    assert whole.choices[0].token_ids is None


@pytest.mark.parametrize("make", [completion, chat])
def test_origins_have_logprobs_where_these_are_asked_for(make: Any) -> None:
    reply = make(return_token_origins=True, logprobs=1 if make is completion else True)
    prompts = reply.encode()
    said = choice("ab", logprobs=[entry(C, A), {B: Logprob(-float("inf"), 9)}])
    whole: Any = reply.whole([delta(said)], count_usage(prompts, 2, 0))
    assert [each.logprob for each in whole.choices[0].token_origins] == [-2.0, -9999.0]


@pytest.mark.parametrize("make", [completion, chat])
@pytest.mark.parametrize("wanted", [True, False])
def test_token_ids_are_returned_as_asked(make: Any, wanted: bool) -> None:
    reply = make(return_token_ids=wanted, stream=True)
    prompts = reply.encode()
    chunks = parsed(reply.events(0, delta(choice("ab"))))
    assert chunks[-1]["choices"][0].get("token_ids") == ([A, B] if wanted else None)
    whole: Any = reply.whole([delta(choice("ab"))], count_usage(prompts, 2, 0))
    assert whole.choices[0].token_ids == ([A, B] if wanted else None)
    holder = whole.choices[0] if make is completion else whole
    assert holder.prompt_token_ids == (prompts[0] if wanted else None)


def test_logprobs_of_prompts_come_with_the_first_choice() -> None:
    of_prompt = [None, {B: Logprob(-float("inf"), 4), C: Logprob(-0.5, 1)}]
    expected = [
        None,
        {
            str(B): {"logprob": -9999.0, "rank": 4, "decoded_token": "b"},
            str(C): {"logprob": -0.5, "rank": 1, "decoded_token": "c"},
        },
    ]
    reply = completion(n=2, prompt_logprobs=1)
    prompts = reply.encode()
    found = delta(choice("a", 0), choice("b", 1), prompt=of_prompt)
    whole: Any = reply.whole([found], count_usage(prompts, 2, 0))
    assert [each.prompt_logprobs for each in whole.choices] == [expected, None]
    talk = chat(prompt_logprobs=1)
    talk.encode()
    answer: Any = talk.whole([found], count_usage(prompts, 2, 0))
    assert answer.prompt_logprobs == expected
    answer = talk.whole([delta(choice("a"))], count_usage(prompts, 1, 0))
    assert answer.prompt_logprobs is None


@pytest.mark.parametrize(("asked", "tops"), [({}, ""), ({"top_logprobs": 2}, "db")])
def test_likely_tokens_of_a_chat(asked: dict[str, Any], tops: str) -> None:
    reply = chat(logprobs=True, **asked)
    prompts = reply.encode()
    said = choice("a", logprobs=[{A: Logprob(-3.0, 3), B: Logprob(-2.0, 2), D: Logprob(-1.0, 1)}])
    whole: Any = reply.whole([delta(said)], count_usage(prompts, 1, 0))
    (found,) = whole.choices[0].logprobs.content
    assert (found.token, found.logprob, found.bytes) == ("a", -3.0, [ord("a")])
    assert [each.token for each in found.top_logprobs] == list(tops)
    assert [each.logprob for each in found.top_logprobs] == [-1.0, -2.0][: len(tops)]


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (completion, {"suffix": "x"}, "suffix"),
    (completion, {"best_of": 2}, "best_of"),
    (completion, {"best_of": 1, "n": 2}, "best_of"),
    (completion, {"max_tokens": 0}, "max_tokens"),
    (completion, {"prompt": []}, "prompt"),
    (completion, {"stream_options": {}}, "stream_options"),
    (completion, {"stream": True, "prompt_logprobs": 0}, "stream"),
    (chat, {"top_logprobs": 1}, "top_logprobs"),
    (chat, {"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens"),
    (chat, {"tool_choice": "required"}, "tool_choice"),
    (chat, {"continue_final_message": True}, "continue_final_message"),
]
TAKEN: list[tuple[Any, dict[str, Any]]] = [
    (completion, {"suffix": ""}),
    (completion, {"best_of": 1}),
    (completion, {"best_of": 2, "n": 2}),
    (completion, {"max_tokens": 0, "echo": True}),
    (completion, {"max_tokens": 1}),
    (completion, {"prompt": [A]}),
    (completion, {"prompt": [[A, B], [C]]}),
    (completion, {"stream_options": {}, "stream": True}),
    (completion, {"prompt_logprobs": 0}),
    (chat, {"top_logprobs": 0}),
    (chat, {"top_logprobs": 1, "logprobs": True}),
    (chat, {"max_tokens": 3, "max_completion_tokens": 3}),
    (chat, {"max_tokens": 3}),
    (chat, {"max_completion_tokens": 3}),
    (chat, {"tool_choice": "none"}),
]


@pytest.mark.parametrize(("make", "options", "param"), REFUSED, ids=name_of)
def test_what_contradicts_itself_is_refused(make: Any, options: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        make(**options)
    assert (refused.value.status_code, refused.value.param) == (400, param)


@pytest.mark.parametrize(("make", "options"), TAKEN, ids=name_of)
def test_what_does_not_is_taken(make: Any, options: dict[str, Any]) -> None:
    reply = make(**options)
    given = options.get("prompt", "ab") if make is completion else None
    prompts = reply.encode()
    assert len(prompts) == reply.num_prompts == (2 if given == [[A, B], [C]] else 1)
    limit = options.get("max_completion_tokens", options.get("max_tokens"))
    assert limit is None or reply.params.max_tokens == max(limit, 1)


@pytest.mark.parametrize(
    ("given", "defaults", "expected"),
    [
        ({}, {}, (1.0, 0, 16)),
        ({}, {"temperature": 0.5, "top_k": 3}, (0.5, 3, 16)),
        ({"temperature": None}, {"temperature": 0.5}, (0.5, 0, 16)),
        ({"temperature": 0.0, "max_tokens": 5}, {"temperature": 0.5, "max_tokens": 9}, (0, 0, 5)),
        ({"max_tokens": None}, {"max_tokens": 9}, (1.0, 0, 9)),
        ({"max_tokens": None}, {}, (1.0, 0, None)),
    ],
)
def test_a_body_goes_before_the_models_defaults(
    given: dict[str, Any], defaults: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    body = CompletionRequest(prompt="a", **given)
    params = CompletionReply(service_of(**defaults), body).params
    assert (params.temperature, params.top_k, params.max_tokens) == expected


@pytest.mark.parametrize("key", ["1", "0000000001", "a", "-1", "", "1" * 11, "²", "1.0"])
def test_keys_of_biases_are_token_ids(key: str) -> None:
    body = CompletionRequest(prompt="a", logit_bias={key: 1.0})
    if key in ("1", "0000000001"):
        assert body.sampling_params({}).logit_bias == {1: 1.0}
        return
    with pytest.raises(ValueError, match="a key of logit_bias must be a token id"):
        body.sampling_params({})


WEATHER, NOW = (
    {"type": "function", "function": {"name": name, "strict": strict}}
    for name, strict in (("weather", None), ("now", True))
)
NAMED = {"type": "function", "function": {"name": "now"}}
JSON_OBJECT = {"response_format": {"type": "json_object"}}
Constrained = tuple[dict[str, Any], bool, bool, bool]  # options; thinks, a grammar, a prelude
CONSTRAINED: list[Constrained] = [
    ({}, False, False, False),
    ({}, True, False, False),
    (JSON_OBJECT, False, False, False),
    (JSON_OBJECT, True, False, True),
    ({"tools": [WEATHER]}, True, False, False),
    ({"tools": [WEATHER, NOW]}, False, True, False),
    ({"tools": [WEATHER, NOW], "tool_choice": "none"}, False, False, False),
    ({"tools": [WEATHER, NOW], **JSON_OBJECT}, False, False, False),
    ({"tools": [WEATHER, NOW], **JSON_OBJECT}, True, False, True),
    ({"tools": [WEATHER], "tool_choice": "required"}, False, True, False),
    ({"tools": [WEATHER], "tool_choice": "required"}, True, True, False),
    ({"tools": [WEATHER, NOW], "tool_choice": NAMED}, False, True, False),
]


def constrained(thinks: bool, **options: Any) -> Any:
    """The form of answers of a model that thinks, or does not."""
    forms = replace(SERVICE.forms, thinks=thinks)
    body = {"messages": [{"role": "user", "content": "a"}]} | options
    reply = ChatReply(replace(SERVICE, forms=forms), ChatRequest.model_validate(body))
    reply.encode()
    return reply.params.structured_outputs


@pytest.mark.parametrize(("options", "thinks", "by_grammar", "prelude"), CONSTRAINED)
def test_answers_are_constrained_where_calls_or_forms_must_match(
    options: dict[str, Any], thinks: bool, by_grammar: bool, prelude: bool
) -> None:
    form = constrained(thinks, **options)
    if form is None:
        assert not by_grammar and not prelude and "response_format" not in options
        return
    assert (form.grammar is not None) == by_grammar
    assert (form.prelude is not None) == prelude
    if by_grammar:
        wanted = options.get("tool_choice") in (NAMED, None)
        assert ('"now"' in form.grammar or "now" in form.grammar) == wanted
        assert ("weather" in form.grammar) == (options.get("tool_choice") != NAMED)


def test_one_call_at_a_time() -> None:
    options = {"tools": [WEATHER], "tool_choice": "required"}
    several = constrained(False, **options).grammar
    for parallel in (None, True):
        assert constrained(False, **options, parallel_tool_calls=parallel).grammar == several
    assert constrained(False, **options, parallel_tool_calls=False).grammar != several


@pytest.mark.parametrize(("said", "opened"), [("<think>", True), ("<think>\n", True), ("a", False)])
def test_reasoning_that_the_prompt_opens(said: str, opened: bool) -> None:
    """It is looked for in the last tokens of the prompt."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}"
    info = replace(SERVICE.engine.info, tokenizer=tokenizer)
    engine = cast("ServedEngine", SimpleNamespace(info=info, num_restarts=0))
    service = make_service(engine, limits=ServerLimits(), model_name=None, created=0)
    service = replace(service, forms=replace(service.forms, thinks=True))
    turns = [{"role": "user", "content": "b" * 9 + said}]
    reply = ChatReply(service, ChatRequest.model_validate({"messages": turns}))
    prompts = reply.encode()
    whole: Any = reply.whole([delta(choice("c</think>d"))], count_usage(prompts, 3, 0))
    message = whole.choices[0].message
    if opened:
        assert (message.reasoning_content, message.content) == ("c", "d")
    else:
        assert (message.reasoning_content, message.content) == (None, "c</think>d")


@pytest.mark.parametrize(("options", "silent"), [({}, True), ({"return_token_ids": True}, False)])
def test_what_may_begin_a_call_is_held_back(options: dict[str, Any], silent: bool) -> None:
    """Its tokens are sent where they are asked for, and its text when it turns out to be none."""
    reply = chat(tools=[WEATHER], stream=True, **options)
    reply.encode()
    greeting, first = parsed(reply.events(0, delta(choice("a"))))
    assert greeting["choices"][0]["delta"]["role"] == "assistant"
    assert first["choices"][0]["delta"] == {"content": "a"}
    held = parsed(reply.events(0, delta(choice("<"))))
    assert [event["choices"][0]["delta"] for event in held] == ([] if silent else [{}])
    (last,) = parsed(reply.events(0, delta(choice("", finish="length", token_ids=[]))))
    assert last["choices"][0]["delta"] == {"content": "<"}
    assert last["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_calls_are_the_reason_to_stop(finish: str) -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"a": 1}}</tool_call>'
    reply = chat(tools=[WEATHER], stream=True)
    prompts = reply.encode()
    said = [
        event["choices"][0] for event in parsed(reply.events(0, delta(choice(text, 0, finish))))
    ]
    reason = "tool_calls" if finish == "stop" else finish
    assert [each["finish_reason"] for each in said] == [*[None] * (len(said) - 1), reason]
    calls = [call for each in said for call in each["delta"].get("tool_calls", [])]
    assert [call["index"] for call in calls] == [0] * len(calls)
    assert "".join(call["function"].get("arguments", "") for call in calls) == '{"a": 1}'
    assert len(calls[0]["id"]) == 9 and calls[0]["function"]["name"] == "weather"
    whole: Any = reply.whole([delta(choice("hm", 0, "stop"))], count_usage(prompts, 1, 0))
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == ("hm", "stop")


@pytest.mark.parametrize(
    ("make", "options", "each"),
    [
        (completion, {}, 0),
        (completion, {"logprobs": 3}, 0),
        (completion, {"prompt_logprobs": 2}, 3),
        (completion, {"echo": True, "logprobs": 3, "n": 2}, 8),
        (completion, {"echo": True, "logprobs": 3, "n": 2, "prompt_logprobs": 0}, 9),
        (chat, {}, 0),
        (chat, {"prompt_logprobs": 2}, 3),
    ],
)
def test_logprobs_of_prompts_are_bounded(
    make: Any, options: dict[str, Any], each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (prompt,) = make(**options).encode()
    for more, most in ((0, each * len(prompt)), (1, each * len(prompt) - 1)):
        limits = replace(SERVICE.limits, max_prompt_logprobs=max(most, 0))
        monkeypatch.setattr(f"{__name__}.SERVICE", replace(SERVICE, limits=limits))
        reply = make(**options)
        if more and each:
            with pytest.raises(ApiError, match=f"{most + 1} logprobs of prompts, the most is"):
                reply.encode()
        else:
            reply.encode()


def test_numbers_that_are_not_given() -> None:
    assert [completion(n=n).params.n for n in (None, 1, 3)] == [1, 1, 3]
    bodies = [CompletionRequest(prompt="a", n=n) for n in (None, 1, 3)]
    assert [body.num_choices for body in bodies] == [1, 1, 3]
    wanted = [{}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 2}]
    assert [chat(**each).params.logprobs for each in wanted] == [None, 0, 2]


def test_messages_as_templates_read_them() -> None:
    calls = [{"id": "c", "function": {"name": "f", "arguments": '{"a": 1}'}}]
    said = Message.model_validate({"role": "assistant", "tool_calls": calls, "content": None})
    assert said.for_template()["content"] == ""
    assert said.for_template(none_for_calls=True)["content"] is None
    assert said.all_texts == ["", '{"a": 1}', ""]
    spoken = said.model_copy(update={"content": "x"})
    assert spoken.for_template(none_for_calls=True)["content"] == "x"
    plain = Message(role="developer", content="", name="Ada")
    assert plain.for_template(none_for_calls=True) == {
        "role": "system",
        "content": "",
        "name": "Ada",
    }
    assert Message(role="user", content="x").for_template() == {"role": "user", "content": "x"}


def prompt_of(**options: Any) -> str:
    (prompt,) = chat(**options).encode()
    return TOKENIZER.decode(prompt)


def test_tools_are_put_into_words_for_templates_without_them() -> None:
    assert not SERVICE.forms.template_has_tools
    turn = {"role": "user", "content": "hi"}
    plain = prompt_of(messages=[turn])
    told = prompt_of(messages=[turn], tools=[WEATHER, NOW])
    assert told.endswith(plain) and told != plain
    assert '"weather"' in told and '"now"' in told and "<tool_call>" in told
    assert "weather" not in prompt_of(messages=[turn], tools=[WEATHER], tool_choice="none")
    for role in ("system", "developer"):
        first = {"role": role, "content": "Be brief."}
        both = prompt_of(messages=[first, turn], tools=[WEATHER, NOW])
        assert both == told.replace("You may call", "Be brief.\n\nYou may call", 1)


@pytest.mark.parametrize(
    ("options", "ends"),
    [
        ({}, True),
        ({"add_generation_prompt": None}, True),
        ({"add_generation_prompt": False}, False),
    ],
)
def test_a_conversation_ends_with_the_start_of_an_answer(options: Any, ends: bool) -> None:
    turns = [{"role": "user", "content": "hi"}]
    begun, ended = (
        TOKENIZER.apply_chat_template(turns, tokenize=False, add_generation_prompt=on)
        for on in (True, False)
    )
    assert begun != ended
    assert prompt_of(messages=turns, **options) == (begun if ends else ended)


ASSISTANT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
VARIABLES: list[tuple[dict[str, Any], str | None]] = [
    ({"chat_template_kwargs": {"thinking": True}}, None),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"not a name": 1}}, "chat_template_kwargs"),
    ({"messages": ASSISTANT, "continue_final_message": True}, None),
    ({"messages": ASSISTANT[:1], "continue_final_message": True}, "continue_final_message"),
    (
        {"messages": ASSISTANT, "continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
    ),
    ({"messages": ASSISTANT, "continue_final_message": True, "add_generation_prompt": False}, None),
    ({"messages": ASSISTANT[:1], "add_generation_prompt": True}, None),
    ({"tools": [WEATHER], "tool_choice": NAMED}, "tool_choice"),
    ({"tool_choice": NAMED}, "tool_choice"),
    ({"tools": [WEATHER, NOW], "tool_choice": NAMED}, None),
]


@pytest.mark.parametrize(("options", "param"), VARIABLES)
def test_variables_of_templates(options: dict[str, Any], param: str | None) -> None:
    if param is None:
        assert chat(**options).encode()
        return
    with pytest.raises(ApiError) as refused:
        chat(**options)
    assert (refused.value.status_code, refused.value.param) == (400, param)


SOME_FORMS = replace(SERVICE.forms, thinks=False, channels=False, special=frozenset({"<x>"}))


@pytest.mark.parametrize(
    ("changes", "with_tools", "needs", "parser"),
    [
        ({}, False, False, None),
        ({}, True, False, ToolParser),
        ({"special": frozenset({"<tool_call>"})}, True, True, ToolParser),
        ({"special": frozenset({"<tool_call>"})}, False, False, None),
        ({"thinks": True}, False, False, ReasoningParser),
        ({"thinks": True, "special": frozenset({"<think>"})}, False, True, ReasoningParser),
        ({"special": frozenset({"<think>"})}, True, False, ToolParser),
        ({"channels": True}, False, True, ChannelParser),
    ],
)
def test_forms_of_answers(
    changes: dict[str, Any], with_tools: bool, needs: bool, parser: Any
) -> None:
    forms = replace(SOME_FORMS, **changes)
    assert forms.always_parsed == bool(changes.get("thinks") or changes.get("channels"))
    assert forms.needs_special(with_tools=with_tools) == needs
    found = forms.parser(with_tools=with_tools, reasoning_opened=False)
    assert type(found) is (parser or type(None))


@pytest.mark.parametrize("reasoning", [True, False])
def test_forms_are_known_by_the_tokenizer(reasoning: bool) -> None:
    thinking = SimpleNamespace(
        chat_template="<think>{{ tools }}",
        all_special_tokens=["<s>"],
        get_vocab=dict,
        added_tokens_decoder={},
        convert_tokens_to_ids=len,
    )
    forms = make_answer_forms(thinking, "auto", reasoning)
    assert (forms.tools.name, forms.thinks, forms.channels) == ("hermes", reasoning, False)
    assert forms.template_has_tools and forms.special == {"<s>"} and forms.texts is not None
    forms = make_answer_forms(thinking, GPT_OSS.name, reasoning)
    assert (forms.tools, forms.thinks, forms.channels) == (GPT_OSS, False, reasoning)
    forms = make_answer_forms(None, "auto", reasoning)
    assert (forms.thinks, forms.channels, forms.template_has_tools) == (False, False, False)
    assert forms.texts is None and not forms.special
    with pytest.raises(ValueError, match=r"tool_format must be one of auto, .*, got 'x'"):
        make_answer_forms(None, "x", reasoning)


@pytest.mark.parametrize("skips", [None, True, False])
def test_marks_that_were_wanted_for_their_place_are_not_shown(skips: bool | None) -> None:
    forms = replace(SERVICE.forms, thinks=True, special=frozenset({"<think>", "<end>"}))
    body = {"messages": [{"role": "user", "content": "a"}], "skip_special_tokens": skips}
    reply = ChatReply(replace(SERVICE, forms=forms), ChatRequest.model_validate(body))
    prompts = reply.encode()
    assert reply.params.skip_special_tokens is False
    whole: Any = reply.whole([delta(choice("b<end>"))], count_usage(prompts, 2, 0))
    assert whole.choices[0].message.content == ("b<end>" if skips is False else "b")


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_a_response_repeats_what_was_asked_for(finish: str) -> None:
    tool = {"type": "function", "name": "f"}
    given = {"input": "a", "tools": [tool], "tool_choice": "none", "max_output_tokens": 5}
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
    body = ResponseRequest.model_validate(given | {"text": {"format": form}, "temperature": 0.5})
    reply = ResponseReply(SERVICE, body)
    (prompt,) = reply.encode()
    assert (reply.num_prompts, reply.streams, reply.params.max_tokens) == (1, False, 5)
    said = delta(choice("b", finish=finish))
    whole: Any = reply.whole([said], count_usage([prompt], 1, 0))
    found = whole.model_dump()
    cut = {"reason": "max_output_tokens"} if finish == "length" else None
    assert found["status"] == ("incomplete" if cut else "completed")
    assert found["output"][0]["content"][0]["text"] == "b"
    expected = {
        "incomplete_details": cut,
        "tools": [tool],
        "text": {"format": form},
        "tool_choice": "none",
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": 0.5,
        "max_output_tokens": 5,
        "store": False,
    }
    assert {name: found[name] for name in expected} == expected
    assert found["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}
