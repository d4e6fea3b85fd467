"""What clients, dashboards and operators count on: defaults, bounds, kinds of errors."""

from __future__ import annotations

import inspect
import json
import math
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("transformers")
for needed in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(needed)

from pydantic import ValidationError  # noqa: E402
from random_engine import RandomEngine  # noqa: E402
from server_models import tiny_tokenizer  # noqa: E402
from tokenizers import pre_tokenizers  # noqa: E402

from anabranch.llm.engine.async_llm import EngineDead  # noqa: E402
from anabranch.llm.server import command, metrics  # noqa: E402
from anabranch.llm.server.app import make_app  # noqa: E402
from anabranch.llm.server.chat import ChatReply  # noqa: E402
from anabranch.llm.server.chat_models import ChatRequest  # noqa: E402
from anabranch.llm.server.command import make_room_for  # noqa: E402
from anabranch.llm.server.completion_models import CompletionRequest  # noqa: E402
from anabranch.llm.server.engine_watch import HangPolicy  # noqa: E402
from anabranch.llm.server.errors import (  # noqa: E402
    ApiError,
    RequestBroken,
    RequestRefused,
    ServerClosing,
    as_api_error,
)
from anabranch.llm.server.gate import has_many_values  # noqa: E402
from anabranch.llm.server.http_server import HttpServer  # noqa: E402
from anabranch.llm.server.reply import written  # noqa: E402
from anabranch.llm.server.restarting_engine import RestartPolicy  # noqa: E402
from anabranch.llm.server.server_limits import ServerLimits  # noqa: E402
from anabranch.llm.server.service import Service, make_service  # noqa: E402
from anabranch.llm.server.token_texts import TokenTexts  # noqa: E402

DEFAULTS: dict[Any, dict[str, Any]] = {
    ServerLimits: {
        "max_queue": 256,
        "max_body_bytes": 8 * 1024 * 1024,
        "max_request_seconds": 600.0,
        "max_prompt_tokens": None,
        "max_prompt_logprobs": 262_144,
        "header_seconds": 20.0,
        "body_seconds": 60.0,
        "max_connections": 1024,
    },
    RestartPolicy: {"max_restarts": 3, "first_delay": 1.0, "window_seconds": 600.0},
    HangPolicy: {"silence_seconds": 30.0, "step_seconds": 600.0},
    command.serve: {
        "host": "127.0.0.1",
        "port": 8000,
        "max_engine_restarts": 3,
        "max_step_seconds": 600.0,
        "drain_seconds": 60,
        "reasoning": True,
        "tool_format": "auto",
    },
    make_service: {"tool_format": "auto", "reasoning": True},
    HttpServer.__init__: {"host": "127.0.0.1", "port": 8000, "drain_seconds": 60.0},
}
KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


@pytest.mark.parametrize("made", DEFAULTS, ids=lambda made: made.__qualname__)
def test_defaults(made: Any) -> None:
    if isinstance(made, type):
        assert asdict(made()) == DEFAULTS[made]
        return
    given = inspect.signature(made).parameters
    assert {name: given[name].default for name in DEFAULTS[made]} == DEFAULTS[made]


@pytest.mark.parametrize(("status", "kind"), KINDS.items())
def test_errors_have_openais_kinds(status: int, kind: str) -> None:
    error = json.loads(ApiError(status, "no", param="p", code="c").body)["error"]
    assert error == {"message": "no", "type": kind, "param": "p", "code": "c"}


def test_completions_document_these_statuses() -> None:
    service = cast("Service", SimpleNamespace(limits=ServerLimits()))
    paths = make_app(service).openapi()["paths"]
    completions = paths["/v1/completions"]["post"]["responses"]
    assert {int(status) for status in completions} == {200, 422, *KINDS}  # FastAPI adds 422


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ApiError(404, "x", code="lost"), 404, "lost"),
        (EngineDead("gone"), 500, "engine_failed"),
        (TimeoutError(), 408, "time_limit"),
        (RequestRefused("x"), 400, None),
        (RequestBroken("GrammarError: x"), 400, "grammar"),
        (RequestBroken("KeyError: x"), 500, "request_failed"),
        (ServerClosing(), 503, "shutting_down"),
        (ZeroDivisionError(), 500, None),
    ],
)
def test_exceptions_become_answers(error: BaseException, status: int, code: str | None) -> None:
    answer = as_api_error(error)
    assert (answer.status_code, answer.code) == (status, code)


BOUNDS: dict[str, tuple[Any, Any]] = {  # the most that is taken, and a little more
    "stop": (["x"] * 256, ["x"] * 257),
    "the length of stop": (["x" * 4096] * 2, ["x" * 4096, "x" * 4097]),
    "one stop": ("x" * 8192, "x" * 8193),
    "stop_token_ids": ([5] * 1024, [5] * 1025),
    "logit_bias": ({str(i): 1.0 for i in range(1024)}, {str(i): 1.0 for i in range(1025)}),
    "prompt_logprobs": (20, 21),
    "logprobs": (20, 21),
    "bad_words": (["x"] * 128, ["x"] * 129),
    "prompt": ([(1 << 31) - 1], [1 << 31]),
    "max_tokens": ((1 << 31) - 1, 1 << 31),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_bounds_of_fields(name: str) -> None:
    most, more = BOUNDS[name]
    field = {"the length of stop": "stop", "one stop": "stop"}.get(name, name)
    body: dict[str, Any] = {"prompt": "x"}
    assert getattr(CompletionRequest(**(body | {field: most})), field) == most
    with pytest.raises(ValidationError):
        CompletionRequest(**(body | {field: more}))


@pytest.mark.parametrize("prompt", ["a", ["a", "b"], [1, 2], [[1, 2], [3]]])
def test_prompts_of_every_kind(prompt: Any) -> None:
    assert CompletionRequest(prompt=prompt).prompt == prompt


def test_numbers_that_json_lacks() -> None:
    assert [written(value) for value in (-0.5, -math.inf)] == [-0.5, -9999.0]


def test_tools_of_a_request() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
    assert len(ChatRequest(**body, tools=[tool] * 128).tools or ()) == 128
    with pytest.raises(ValidationError):
        ChatRequest(**body, tools=[tool] * 129)
    for choice in ("none", "auto", "required", tool):
        assert ChatRequest(**body, tools=[tool], tool_choice=choice).tool_choice is not None


CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
IMAGE = [{"type": "image_url", "image_url": {"url": "x"}}]
WRONG: list[tuple[str, Any, str | None, str]] = [  # a path, a body, the field and what is said
    (COMPLETIONS, b'{"prompt": x}', None, "is not valid JSON at character 11: Expecting value"),
    (COMPLETIONS, b'{"prompt": "a"', None, "is not valid JSON at character 14: Expecting"),
    (COMPLETIONS, [1], None, "body: Input should be a valid dictionary"),
    (COMPLETIONS, {}, "prompt", "prompt: Field required"),
    (COMPLETIONS, {"prompt": "a", "promt": 1}, "promt", "is not a field of this request"),
    (COMPLETIONS, {"prompt": "a", "n": "2"}, "n", "n: Input should be a valid integer, got '2'"),
    (COMPLETIONS, {"prompt": "a", "n": "x" * 61}, "n", f"got '{'x' * 60}'"),
    (COMPLETIONS, {"prompt": "a", "n": [1, 2]}, "n", "got list of 2"),
    (COMPLETIONS, {"prompt": "a", "n": {"a": 1}}, "n", "got dict of 1"),
    (COMPLETIONS, {"prompt": "a", "seed": 10**80}, "seed", f"got 1{'0' * 79}..."),
    (COMPLETIONS, {"prompt": "a", "seed": 10**79}, "seed", f"got 1{'0' * 79}"),
    (COMPLETIONS, {"prompt": ["a", 1]}, "prompt.1", "Input should be a valid string, got 1"),
    (COMPLETIONS, {"prompt": [[1], [True]]}, "prompt.1.0", "a valid integer, got True"),
    (COMPLETIONS, {"prompt": "a", "stop": [1]}, "stop.0", "stop.0: Input should be a valid string"),
    (CHAT, {"messages": []}, "messages", "at least 1 item"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content", "Field required"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": None}]},
        "messages.0.content",
        "messages.0.content: must not be null; give a value",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": IMAGE}]},
        "messages.0.content.0.type",
        "Input should be 'text', got 'image_url'",
    ),
    (RESPONSES, {"input": [{"type": "reasoning"}]}, "input", "at least 1 item after validation"),
]


@pytest.fixture(scope="module")
def client() -> Any:
    testclient = pytest.importorskip("starlette.testclient")
    engine = RandomEngine(tiny_tokenizer(), context=64)
    service = make_service(engine, limits=ServerLimits(), model_name="tiny", created=0)
    return testclient.TestClient(make_app(service), base_url="http://localhost")


@pytest.mark.parametrize(("path", "body", "param", "said"), WRONG)
def test_what_is_wrong_with_a_body(
    path: str, body: Any, param: str | None, said: str, client: Any
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = client.post(path, content=content, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert said in error["message"]
    assert ("..." in error["message"]) == ("..." in said)


def test_a_body_that_is_no_json_by_its_type(client: Any) -> None:
    answer = client.post(COMPLETIONS, content=b"{}", headers={"content-type": "text/plain"})
    assert answer.status_code == 415 and "'text/plain'" in answer.json()["error"]["message"]


def test_as_many_tokens_as_a_context_become_text(client: Any) -> None:
    for size, status in ((64, 200), (65, 400)):
        answer = client.post("/detokenize", json={"tokens": [5] * size})
        assert answer.status_code == status
        assert ("at most 64 tokens, got 65" in answer.text) == (status == 400)
    last = len(tiny_tokenizer()) - 1
    for token, status in ((last, 200), (last + 1, 400)):
        assert client.post("/detokenize", json={"tokens": [token]}).status_code == status


@pytest.mark.parametrize("field", ["prompt", "messages"])
def test_texts_longer_than_a_context_are_tokenized(field: str) -> None:
    """As long as their bytes might fit."""
    testclient = pytest.importorskip("starlette.testclient")
    engine = RandomEngine(tiny_tokenizer(), context=1024)
    service = make_service(engine, limits=ServerLimits(), model_name="tiny", created=0)
    client = testclient.TestClient(make_app(service), base_url="http://localhost")
    for size, status in ((33_000, 200), (34_000, 400)):
        text = "~" * size
        body = text if field == "prompt" else [{"role": "user", "content": text}]
        answer = client.post("/tokenize", json={field: body})
        assert answer.status_code == status
        assert status == 400 or answer.json()["count"] >= size


def streamed(client: Any, **body: Any) -> list[Any]:
    body |= {"stream": True, "stream_options": {"include_usage": True} | body.pop("options", {})}
    *lines, done = client.post(COMPLETIONS, json=body).text.strip().split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_the_prompt_is_echoed_with_the_first_text(client: Any) -> None:
    said = streamed(client, prompt="hello the", max_tokens=6, echo=True, ignore_eos=True)
    first, *later = [chunk["choices"][0]["text"] for chunk in said if chunk["choices"]]
    assert first.startswith("hello the")
    assert later and not any("hello the" in text for text in later)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_token_that_is_not_sent_is_not_counted(max_tokens: int, client: Any) -> None:
    every = {"continuous_usage_stats": True}
    body = {"prompt": "hello", "max_tokens": max_tokens, "echo": True, "ignore_eos": True}
    said = streamed(client, **body, options=every)
    assert [chunk["usage"]["completion_tokens"] for chunk in said] == [max_tokens] * 2


@pytest.mark.parametrize("effort", [None, "low"])
def test_a_template_is_told_the_effort_that_was_given(effort: Any) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% if reasoning_effort is defined %}{{ reasoning_effort }}{% endif %}!"
    )
    engine = RandomEngine(tokenizer, context=64)
    service = make_service(engine, limits=ServerLimits(), model_name="tiny", created=0)
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
    (prompt,) = ChatReply(service, ChatRequest(**body, reasoning_effort=effort)).encode()
    assert tokenizer.decode(prompt) == ("!" if effort is None else "low!")


def test_unknown_fields_and_other_types_are_refused() -> None:
    for wrong in (
        {"prompt": "x", "promt": 1},
        {"prompt": "x", "n": "2"},
        {"prompt": "x", "n": 1.0},
    ):
        with pytest.raises(ValidationError):
            CompletionRequest(**cast("dict[str, Any]", wrong))


def test_bodies_of_half_a_million_values_are_the_largest() -> None:
    largest = b"[" + b"1," * ((1 << 19) - 1) + b"1]"
    assert not has_many_values([largest])
    assert has_many_values([b"[1," + largest[1:]])
    assert not has_many_values([b"[" * (1 << 15)])
    assert has_many_values([b"[" * (1 << 15), b"{"])
    assert not has_many_values([b'"' + b"," * (1 << 19) + b'"'])


def test_bounds_of_histograms_are_those_of_dashboards() -> None:
    kept = SimpleNamespace(snapshot=None, trouble=None, num_restarts=0, info=None)
    made = metrics.Metrics("tiny", cast("Any", kept))
    between = [0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5]
    whole = [0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 240, 600]
    first = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120]
    sizes = [1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144]
    expected = {
        "first_token": first,
        "between": between,
        "per_token": between,
        "whole": whole,
        "prompt_sizes": sizes,
        "output_sizes": sizes,
    }
    for name, bounds in expected.items():
        (family,) = list(getattr(made, name).collect())
        found = [each.labels["le"] for each in family.samples if "le" in each.labels]
        assert list(map(float, found)) == [*bounds, float("inf")], name


def test_a_request_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two continuations of 3 and 1 tokens, at moments of a clock that the test sets."""
    now = [100.0]
    monkeypatch.setattr(metrics, "time", SimpleNamespace(monotonic=lambda: now[0]))
    kept = SimpleNamespace(snapshot=None, trouble=None, num_restarts=0, info=None)
    made = metrics.Metrics("tiny", cast("Any", kept))

    def delta(*choices: tuple[int, int, str | None], finished: bool = False) -> Any:
        parts = [
            SimpleNamespace(number=number, token_ids=[7] * size, finish_reason=reason)
            for number, size, reason in choices
        ]
        size = sum(size for _, size, _ in choices)
        return SimpleNamespace(
            choices=parts, num_tokens=size, finished=finished, num_cached_tokens=16
        )

    def value(name: str) -> float | None:
        return made._registry.get_sample_value(f"anabranch:{name}", labels)  # pyright: ignore[reportPrivateUsage]

    labels = {"model_name": "tiny"}
    watch = made.watch(20, arrival=98.0)
    assert watch.observe(delta((0, 1, None)))
    now[0] = 101.0
    assert not watch.observe(delta((0, 1, None), (1, 1, "stop")))
    now[0] = 104.0
    assert not watch.observe(delta((0, 1, "length"), finished=True))
    watch.end()
    for _ in range(2):
        given_up = made.watch(5, arrival=104.0)
        given_up.end()
    expected = {
        "prompt_tokens_total": 30,
        "generation_tokens_total": 4,
        "prefix_cache_queries_total": 20,
        "prefix_cache_hits_total": 16,
        "time_to_first_token_seconds_sum": 2,
        "time_to_first_token_seconds_count": 1,
        "inter_token_latency_seconds_sum": 4,  # 1 and 3
        "inter_token_latency_seconds_count": 2,
        "request_time_per_output_token_seconds_sum": 2,  # 4 s for 2 tokens after the first
        "request_time_per_output_token_seconds_count": 1,
        "e2e_request_latency_seconds_sum": 6,
        "request_prompt_tokens_sum": 20,
        "request_generation_tokens_sum": 4,
    }
    assert {name: value(name) for name in expected} == expected
    for reason, number in (("stop", 1), ("length", 1), ("abort", 2)):
        labels["finished_reason"] = reason
        assert value("request_success_total") == number


def test_two_tokens_have_a_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr(metrics, "time", SimpleNamespace(monotonic=lambda: now[0]))
    kept = SimpleNamespace(snapshot=None, trouble=None, num_restarts=0, info=None)
    made = metrics.Metrics("tiny", cast("Any", kept))
    watch = made.watch(1, arrival=10.0)
    for moment in (10.0, 13.0):
        now[0] = moment
        choices = [SimpleNamespace(number=0, token_ids=[7], finish_reason=None)]
        given = {"num_tokens": 1, "finished": moment > 10, "num_cached_tokens": 0}
        watch.observe(cast("Any", SimpleNamespace(choices=choices, **given)))
    name = "anabranch:request_time_per_output_token_seconds_sum"
    assert made._registry.get_sample_value(name, {"model_name": "tiny"}) == 3  # pyright: ignore[reportPrivateUsage]


def test_letters_of_bytes_are_the_librarys() -> None:
    """Every byte that a byte-level tokenizer can write is read back."""
    texts = TokenTexts(tiny_tokenizer())
    vocab = tiny_tokenizer().get_vocab()
    letters = pre_tokenizers.ByteLevel.alphabet()
    found = {texts.bytes_of(vocab[letter]) for letter in letters}
    assert found == {bytes([byte]) for byte in range(256)}
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for byte in range(128):
        ((letter, _),) = split.pre_tokenize_str(chr(byte))
        assert texts.bytes_of(vocab[letter]) == bytes([byte])
    assert TokenTexts(None).longest_bytes == 1


@pytest.mark.parametrize(
    ("soft", "hard", "after"), [(100, -1, 266), (100, 200, 200), (100, 266, 266), (266, 300, None)]
)
def test_open_files_are_raised_to_what_is_needed(
    soft: int, hard: int, after: int | None, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    import resource

    assert resource.RLIM_INFINITY == -1
    raised = list[tuple[int, int]]()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    make_room_for(10)
    assert raised == ([] if after is None else [(after, hard)])
    assert bool(caplog.records) == (after == 200)


@pytest.mark.parametrize(
    ("made", "least", "refused"),
    [
        (RestartPolicy, {"max_restarts": 0, "first_delay": 0.0}, {"max_restarts": -1}),
        (RestartPolicy, {"first_delay": 0.5}, {"first_delay": -0.5}),
        (RestartPolicy, {"window_seconds": 0.5}, {"window_seconds": 0.0}),
        (HangPolicy, {"silence_seconds": 0.5}, {"silence_seconds": 0.0}),
        (HangPolicy, {"step_seconds": 0.5}, {"step_seconds": math.inf}),
    ],
)
def test_policies_at_their_bounds(made: Any, least: Any, refused: Any) -> None:
    made(**least)
    with pytest.raises(ValueError, match=next(iter(refused))):
        made(**refused)


@pytest.mark.parametrize("port", [-1, 65536])
def test_ports_that_are_none(port: int) -> None:
    with pytest.raises(ValueError, match="port must be from 0 to 65535"):
        command.check_address("127.0.0.1", port)
    command.check_address("127.0.0.1", 0)
    assert command.ENGINE_FAILED_EXIT_CODE == 3
