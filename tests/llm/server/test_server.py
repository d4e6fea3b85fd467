"""The API by OpenAI's own client and by hand: answers, streams, refusals, limits, metrics."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("transformers")
for needed in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(needed)
httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")

from forked_engine import forked_engine  # noqa: E402
from server_models import CONTEXT, Server, engine_config, is_idle, running_server, until  # noqa: E402

from anabranch.llm.engine.config import EngineConfig  # noqa: E402
from anabranch.llm.engine.llm import LLM  # noqa: E402
from anabranch.llm.sampling.params import SamplingParams  # noqa: E402
from anabranch.llm.server.engine_process import EngineProcess  # noqa: E402
from anabranch.llm.server.errors import RequestBroken  # noqa: E402

MAX_QUEUE = 8
PROMPTS = ["hello the hello the ", "€uro the ", "x"]
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 24}
CHAT: dict[str, Any] = {
    "model": "tiny",
    "temperature": 0,
    "messages": [{"role": "user", "content": "hello the "}],
    "max_tokens": 24,
}


@pytest.fixture(scope="module")
def config() -> EngineConfig:
    return engine_config()


@pytest.fixture(scope="module")
def engine(config: EngineConfig) -> Iterator[EngineProcess]:
    process = forked_engine(config)
    yield process
    process.close()


@pytest.fixture(scope="module")
def shared(engine: EngineProcess) -> Iterator[Server]:
    with running_server(engine, max_queue=MAX_QUEUE, max_body_bytes=100_000) as running:
        yield running


@pytest.fixture
def server(shared: Server) -> Iterator[Server]:
    """Whatever a test does, the engine is idle before and after it."""
    until(lambda: is_idle(shared))
    yield shared
    until(lambda: is_idle(shared))


@pytest.fixture
def client(server: Server) -> Any:
    return openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def llm(config: EngineConfig) -> LLM:
    return LLM(config.model, device="cpu", max_num_seqs=4)


def post(server: Server, path: str, body: Any, **options: Any) -> Any:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60, **options)


def events(response: Any) -> list[Any]:
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_the_client_completes_as_the_engine_does(client: Any, llm: LLM) -> None:
    said = client.completions.create(prompt=PROMPTS, **GREEDY)
    ours = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24))
    assert [choice.text for choice in said.choices] == [each.outputs[0].text for each in ours]
    assert [choice.index for choice in said.choices] == [0, 1, 2]
    assert said.usage.prompt_tokens == sum(len(each.prompt_token_ids) for each in ours)
    assert said.usage.completion_tokens == sum(len(each.outputs[0].token_ids) for each in ours)
    assert said.id.startswith("cmpl-")


def test_tokens_and_text_are_the_same_prompt(client: Any, server: Server) -> None:
    tokens = [post(server, "/tokenize", {"prompt": p}).json()["tokens"] for p in PROMPTS]
    by_text = client.completions.create(prompt=PROMPTS, **GREEDY)
    by_tokens = client.completions.create(prompt=tokens, **GREEDY)
    one = client.completions.create(prompt=tokens[0], **GREEDY)
    assert [c.text for c in by_text.choices] == [c.text for c in by_tokens.choices]
    assert one.choices[0].text == by_text.choices[0].text


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n": 3, "temperature": 1.0, "seed": 5},
        {"logprobs": 2, "echo": True, "n": 2},
        {"stop": ["e", "zz"], "n": 2, "temperature": 1.0, "seed": 1},
        {"extra_body": {"top_k": 3, "min_p": 0.05, "repetition_penalty": 1.1, "speculate": False}},
        {"logit_bias": {"40": 5.0, "41": -100}},
    ],
)
def test_a_stream_says_what_the_whole_says(client: Any, options: dict[str, Any]) -> None:
    request = GREEDY | options | {"prompt": PROMPTS}
    whole = client.completions.create(**request)
    texts = [""] * len(whole.choices)
    reasons: list[Any] = [None] * len(texts)
    logprobs: list[Any] = [[] for _ in texts]
    usages: list[Any] = []
    for chunk in client.completions.create(
        **request, stream=True, stream_options={"include_usage": True}
    ):
        usages.append(chunk.usage)
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            if choice.logprobs:
                found = choice.logprobs
                logprobs[choice.index] += zip(
                    found.tokens, found.token_logprobs, found.text_offset, strict=True
                )
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usages[:-1] == [None] * (len(usages) - 1)
    assert usages[-1].completion_tokens == whole.usage.completion_tokens
    for streamed, choice in zip(logprobs, whole.choices, strict=True):
        told = choice.logprobs
        expected = told and [*zip(told.tokens, told.token_logprobs, told.text_offset, strict=True)]
        assert [(t, o) for t, _, o in streamed] == [(t, o) for t, _, o in expected or []]
        close = [pytest.approx(value, abs=1e-3) for _, value, _ in expected or []]
        assert [value for _, value, _ in streamed] == close


def test_chat_whole_and_streamed(client: Any) -> None:
    options = CHAT | {"logprobs": True, "top_logprobs": 3, "n": 2}
    whole = client.chat.completions.create(**options)
    texts, tokens = ["", ""], [[], []]
    roles: list[Any] = []
    for chunk in client.chat.completions.create(**options, stream=True):
        for choice in chunk.choices:
            roles += [choice.delta.role] if choice.delta.role else []
            texts[choice.index] += choice.delta.content or ""
            if choice.logprobs:
                tokens[choice.index] += choice.logprobs.content
    assert roles == ["assistant"] * 2
    assert texts == [choice.message.content for choice in whole.choices]
    for choice, streamed in zip(whole.choices, tokens, strict=True):
        content = choice.logprobs.content
        assert [entry.bytes for entry in content] == [entry.bytes for entry in streamed]
        said = b"".join(bytes(entry.bytes) for entry in content)
        assert said.decode(errors="replace").startswith(choice.message.content)
        for entry in content:
            assert len(entry.top_logprobs) == 3
            assert entry.logprob == max(top.logprob for top in entry.top_logprobs)


TOKENS_IN_CHUNKS = {"include_usage": True, "continuous_usage_stats": True}


@pytest.mark.parametrize("logprobs", [{}, {"logprobs": 1}])
def test_usage_in_every_chunk(server: Server, logprobs: dict[str, Any]) -> None:
    """Of the chunk's own choice and prompt, and of all in the end, as vLLM sends it."""
    options = {"stream": True, "stream_options": TOKENS_IN_CHUNKS, "n": 2, "ignore_eos": True}
    sizes = [len(post(server, "/tokenize", {"prompt": p}).json()["tokens"]) for p in PROMPTS]
    body = GREEDY | options | logprobs | {"prompt": PROMPTS, "return_token_ids": True}
    *chunks, last = events(post(server, "/v1/completions", body))
    seen = [0] * 6
    for chunk in chunks:
        (choice,), usage = chunk["choices"], chunk["usage"]
        seen[choice["index"]] += len(choice["token_ids"])
        assert usage["prompt_tokens"] == sizes[choice["index"] // 2]
        assert usage["completion_tokens"] == seen[choice["index"]]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert seen == [24] * 6
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 24 * 6


def test_usage_in_every_chunk_of_a_chat(server: Server) -> None:
    options = {"stream": True, "stream_options": TOKENS_IN_CHUNKS, "ignore_eos": True}
    hello, *chunks, last = events(post(server, "/v1/chat/completions", CHAT | options))
    assert hello["usage"]["completion_tokens"] == 0
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 24
    assert last["usage"] == chunks[-1]["usage"]
    options["stream_options"] = {"continuous_usage_stats": True}  # nothing without include_usage
    assert "usage" not in events(post(server, "/v1/chat/completions", CHAT | options))[-1]


USER_PARTS = [{"role": "user", "content": [{"type": "text", "text": "hello the"}]}]
TOOL_BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "GuideLLM, text": (
        "/v1/completions",
        {
            "model": "tiny",
            "stream": True,
            "stream_options": TOKENS_IN_CHUNKS,
            "max_tokens": 12,
            "stop": None,
            "ignore_eos": True,
            "prompt": "hello the",
        },
    ),
    "GuideLLM, chat": (
        "/v1/chat/completions",
        {
            "model": "tiny",
            "stream": True,
            "stream_options": TOKENS_IN_CHUNKS,
            "max_completion_tokens": 12,
            "stop": None,
            "ignore_eos": True,
            "messages": USER_PARTS,
        },
    ),
    "GuideLLM 0.3, text": (
        "/v1/completions",
        {
            "model": "tiny",
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 12,
            "max_completion_tokens": 12,
            "stop": None,
            "ignore_eos": True,
            "prompt": "hello the",
        },
    ),
    "vllm bench serve, openai": (
        "/v1/completions",
        {
            "model": "tiny",
            "prompt": "hello the",
            "repetition_penalty": 1.0,
            "max_tokens": 12,
            "logprobs": None,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "temperature": 0.0,
        },
    ),
    "vllm bench serve, openai-chat": (
        "/v1/chat/completions",
        {
            "model": "tiny",
            "messages": USER_PARTS,
            "max_completion_tokens": 12,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "temperature": 0.0,
            "top_p": 1.0,
        },
    ),
}


@pytest.mark.parametrize("name", TOOL_BODIES)
def test_bodies_of_load_generators(server: Server, name: str) -> None:
    path, body = TOOL_BODIES[name]
    answer = post(server, path, body, headers={"x-request-id": "benchmark-1"})
    assert answer.status_code == 200, answer.text
    *chunks, last = events(answer)
    said = [chunk["choices"][0] for chunk in chunks]
    assert "".join(each["text"] if "text" in each else each["delta"]["content"] for each in said)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 12
    assert last["usage"]["prompt_tokens"] > 0


def greets(chunk: Any) -> bool:
    return "role" in chunk["choices"][0].get("delta", {})


@pytest.mark.parametrize("usage", [True, False])
def test_chunks_of_a_stream_have_the_same_fields(server: Server, usage: bool) -> None:
    """Those that bring only text are written by a shortcut."""
    options = {"stream": True, "stream_options": {"include_usage": usage}, "n": 2}
    said = events(post(server, "/v1/completions", GREEDY | options | {"prompt": PROMPTS}))
    told = events(post(server, "/v1/chat/completions", CHAT | options))
    for answer in (said, told):
        chunks = [chunk for chunk in answer if chunk["choices"] and not greets(chunk)]
        assert len({tuple(chunk) for chunk in chunks}) == 1
        assert len({tuple(chunk["choices"][0]) for chunk in chunks}) == 1
        assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
        assert all(("usage" in chunk) == usage for chunk in chunks)


def test_chat_uses_the_template(client: Any, server: Server) -> None:
    messages = [
        {"role": "developer", "content": "the"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "he"}, {"type": "text", "text": "y"}],
        },
        {"role": "assistant", "content": "hello", "refusal": None},
        {"role": "user", "content": "€"},
    ]
    prompt = "<system>the<end><user>hey<end><assistant>hello<end><user>€<end><assistant>"
    chat = client.chat.completions.create(**CHAT | {"messages": messages})
    plain = client.completions.create(prompt=prompt, **GREEDY)
    assert chat.choices[0].message.content == plain.choices[0].text
    assert chat.usage.prompt_tokens == plain.usage.prompt_tokens
    tokens = post(server, "/tokenize", {"messages": messages}).json()["tokens"]
    assert post(server, "/detokenize", {"tokens": tokens}).json()["prompt"] == prompt


def test_an_answer_can_be_said_back(client: Any) -> None:
    said = client.chat.completions.create(**CHAT).choices[0].message
    again = client.chat.completions.create(
        **CHAT | {"messages": [*CHAT["messages"], said, {"role": "user", "content": "x"}]}
    )
    assert again.usage.prompt_tokens > len(said.content or "") / 5


def test_scoring_a_prompt_as_lm_eval_does(client: Any, llm: LLM) -> None:
    tokens = llm.tokenizer(PROMPTS)["input_ids"]
    scored = client.completions.create(
        model="tiny", prompt=tokens, max_tokens=1, temperature=0, logprobs=1, echo=True, seed=1
    )
    none = client.completions.create(
        model="tiny", prompt=tokens, max_tokens=0, temperature=0, logprobs=1, echo=True
    )
    ours = llm.generate(tokens, SamplingParams(max_tokens=1, prompt_logprobs=1))
    for place, prompt in enumerate(PROMPTS):
        with_one, alone = scored.choices[place].logprobs, none.choices[place].logprobs
        entries = ours[place].prompt_logprobs
        assert entries is not None
        expected = [
            None if entry is None else pytest.approx(entry[token].logprob, abs=1e-3)
            for token, entry in zip(tokens[place], entries, strict=True)
        ]
        assert with_one.token_logprobs[:-1] == expected
        assert alone.token_logprobs == expected
        assert none.choices[place].text == prompt
        assert scored.choices[place].text.startswith(prompt)
        for value, top in zip(alone.token_logprobs[1:], alone.top_logprobs[1:], strict=True):
            assert value <= max(top.values())
    assert none.usage.completion_tokens == 0


def test_stop_ends_the_text_before_it(client: Any) -> None:
    whole = client.completions.create(prompt="hello", **GREEDY).choices[0]
    stop = whole.text[5:7]
    place = whole.text.find(stop)
    cut = client.completions.create(prompt="hello", stop=stop, **GREEDY).choices[0]
    kept = client.completions.create(
        prompt="hello", stop=[stop], extra_body={"include_stop_str_in_output": True}, **GREEDY
    ).choices[0]
    assert (cut.text, cut.finish_reason) == (whole.text[:place], "stop")
    assert kept.text == whole.text[: place + len(stop)]


def test_every_token_has_an_origin(client: Any) -> None:
    said = client.completions.create(
        prompt="hello the hello the hello the ",
        logprobs=0,
        extra_body={"return_token_origins": True, "return_token_ids": True, "ignore_eos": True},
        **GREEDY | {"max_tokens": 200},
    ).choices[0]
    origins = said.token_origins
    assert [each["id"] for each in origins] == said.token_ids
    assert "".join(each["text"] for each in origins).startswith(said.text)
    assert {each["origin"] for each in origins} == {"sampled", "accepted", "corrected"}
    steps = [each["step"] for each in origins]
    assert steps == sorted(steps)
    assert [each["logprob"] for each in origins] == said.logprobs.token_logprobs


def test_seeds_repeat(client: Any) -> None:
    def texts(seed: int) -> list[str]:
        options = GREEDY | {"temperature": 1.0, "n": 2, "seed": seed}
        return [
            choice.text for choice in client.completions.create(prompt="the", **options).choices
        ]

    assert texts(1) == texts(1) != texts(2)
    assert len(set(texts(1))) == 2


def test_models_version_and_documents(client: Any, server: Server) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").max_model_len == CONTEXT
    assert httpx.get(f"{server.url}/version").json()["version"]
    tokenizer = httpx.get(f"{server.url}/tokenizer_info").json()
    assert tokenizer["eos_token"] == "<end>"
    assert "add_generation_prompt" in tokenizer["chat_template"]
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/health"} <= set(paths)
    for page in ("/", "/docs"):
        text = httpx.get(f"{server.url}{page}").text
        assert "<html" in text
        assert "https://" not in text.replace("https://github.com", "")


JSON = {"content-type": "application/json"}
BAD_BODIES: dict[str, tuple[bytes, int, str]] = {
    "no JSON": (b'{"prompt": ', 400, "not valid JSON"),
    "no UTF-8": (b'{"prompt": "\xff"}', 400, "UTF-8"),
    "no object": (b"[1]", 400, "object"),
    "deep": (b"[" * 30_000, 400, "nesting"),
    "many lists": (b"[" * 50_000, 413, "32768 lists"),
    "huge number": (b'{"prompt":"a","seed":' + b"9" * 9000 + b"}", 400, "numbers"),
    "half a pair": (b'{"prompt":"\\ud800"}', 400, "surrogate"),
    "too large": (b'{"prompt":"' + b"a" * 100_000 + b'"}', 413, "100000"),
}


@pytest.mark.parametrize("name", BAD_BODIES)
def test_bodies_that_cannot_be_read(server: Server, name: str) -> None:
    body, status, say = BAD_BODIES[name]
    answer = httpx.post(f"{server.url}/v1/completions", content=body, headers=JSON)
    assert answer.status_code == status
    assert say in answer.json()["error"]["message"]


def test_a_body_that_does_not_say_how_long_it_is(server: Server) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", content=iter([b"a" * 9_999] * 11))
    assert answer.status_code == 413
    assert httpx.post(f"{server.url}/v1/completions", content=b"{}").status_code == 415


@pytest.mark.parametrize(
    ("changes", "say"),
    [
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": []}, "empty"),
        ({"prompt": [[]]}, "empty"),
        ({"prompt": [10**6]}, "vocabulary"),
        ({"prompt": [-1]}, "greater than or equal to 0"),
        ({"prompt": "a " * CONTEXT}, "shorten"),
        ({"max_tokens": 10**6}, f"at most {CONTEXT - 1}"),
        ({"max_tokens": 0}, "echo"),
        ({"max_tokens": "5"}, "integer"),
        ({"max_tokens": True}, "integer"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 1e400}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 1000}, "at most"),
        ({"prompt": ["a"] * 1000}, "at most"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 257}, "at most 256 items"),
        ({"stop": ["x" * 5000] * 2}, "at most 8192 characters"),
        ({"stop": "x" * 9000}, "at most 8192 characters"),
        ({"stop_token_ids": [5] * 1025}, "at most 1024 items"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "at most 1024 items"),
        ({"seed": 1 << 64}, "seed"),
        ({"logit_bias": {"the": 1}}, "token id"),
        ({"logit_bias": {"100000": 1}}, "vocabulary"),
        ({"logprobs": 1000}, "logprobs"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"min_tokens": 30}, "min_tokens"),
        ({"best": 1}, "leave it out"),
        ({"stream_options": {"include_usage": True}}, "stream: true"),
        ({"stream": True, "prompt_logprobs": 1}, "stream"),
    ],
)
def test_completions_that_are_refused(server: Server, changes: dict[str, Any], say: str) -> None:
    body = json.dumps({"prompt": "a"} | changes).replace("Infinity", "1e400")
    answer = httpx.post(f"{server.url}/v1/completions", content=body, headers=JSON)
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert say in error["message"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "changes",
    [
        {"messages": []},
        {"messages": "hello"},
        {"messages": [{"role": "king", "content": "x"}]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        {"response_format": {"type": "yaml"}},
        {"tools": [{"type": "function"}]},
        {"top_logprobs": 2},
        {"max_tokens": 2, "max_completion_tokens": 3},
        {"max_tokens": 0},
    ],
)
def test_chats_that_are_refused(server: Server, changes: dict[str, Any]) -> None:
    answer = post(server, "/v1/chat/completions", CHAT | changes)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "changes", "param", "say"),
    [
        ("", {"stream": True, "stream_options": {"foo": 1}}, "stream_options.foo", "leave it out"),
        ("", {"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "boolean"),
        ("", {"max_tokens": 2, "max_completion_tokens": 3}, None, "differ"),
        ("/chat", {"messages": [{"role": "user", "text": "x"}]}, "messages.0.content", "required"),
        (
            "/chat",
            {"messages": [{"role": "user", "content": "x", "tool_id": "1"}]},
            "messages.0.tool_id",
            "leave it out",
        ),
        ("/chat", {"tools": [{"type": "function"}]}, "tools.0.function", "required"),
        ("/chat", {"tool_choice": "required"}, "tool_choice", "tool_choice needs tools"),
        ("/chat", {"response_format": {"type": "yaml"}}, "response_format", "yaml"),
        (
            "/chat",
            {"messages": [{"role": "user", "content": None}]},
            "messages.0.content",
            "messages.0.content: must not be null; give a value",
        ),
        (
            "/chat",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            "messages.0.content.0.type",
            "messages.0.content.0.type: Input should be 'text', got 'image_url'",
        ),
        ("", {"stop": [5]}, "stop.0", "stop.0: Input should be a valid string, got 5"),
    ],
)
def test_the_field_at_fault_is_named(
    server: Server, path: str, changes: dict[str, Any], param: str | None, say: str
) -> None:
    body = ({"messages": CHAT["messages"]} if path else {"prompt": "a"}) | changes
    answer = post(server, f"/v1{path}/completions", body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert say in error["message"]
    assert error["message"].startswith(param or "body") or "not supported" in say


HARMLESS = {
    "metadata": {"run": "7", "nested": {"a": 1}},
    "store": True,
    "service_tier": "auto",
    "parallel_tool_calls": False,
    "reasoning_effort": "low",
    "user": "ada",
    "safety_identifier": "x",
    "prompt_cache_key": "x",
}


def test_harmless_fields_have_no_effect(server: Server) -> None:
    for path, body in (
        ("/v1/completions", GREEDY | {"prompt": "hello"}),
        ("/v1/chat/completions", CHAT),
    ):
        plain = post(server, path, body).json()["choices"]
        for name, value in HARMLESS.items():
            assert post(server, path, body | {name: value}).json()["choices"] == plain
    empty = {"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}}
    assert post(server, "/v1/chat/completions", CHAT | empty).json()["choices"] == plain
    schemas = httpx.get(f"{server.url}/openapi.json").json()["components"]["schemas"]
    for name in HARMLESS.keys() - {"parallel_tool_calls", "reasoning_effort"}:
        described = schemas["ChatRequest"]["properties"][name]["description"]
        assert "without effect" in described


REQUESTS = [
    "CompletionRequest",
    "ChatRequest",
    "StreamOptions",
    "Message",
    "TextPart",
    "TokenizeRequest",
    "DetokenizeRequest",
]
NUMBERS_WITHOUT_BOUNDS = {"best_of"}


def test_the_document_explains_every_field(server: Server) -> None:
    """With an example that is accepted, and the default that holds where a field is left out."""
    document = httpx.get(f"{server.url}/openapi.json").json()
    for schema in REQUESTS:
        described = document["components"]["schemas"][schema]
        for name, field in described["properties"].items():
            assert field["description"] and ("examples" in field or name == "suffix"), name
            if name not in described.get("required", ()):
                assert "default" in field or field["anyOf"][-1] == {"type": "null"}, name
            for kind in field.get("anyOf", [field]):
                if kind.get("type") in ("integer", "number") and name not in NUMBERS_WITHOUT_BOUNDS:
                    assert {"minimum", "exclusiveMinimum"} & kind.keys(), name
                    assert {"maximum", "exclusiveMaximum"} & kind.keys(), name
    fields = document["components"]["schemas"]["ChatRequest"]["properties"]
    defaults = {"temperature": 1.0, "top_p": 1.0, "n": 1, "stream": False, "top_k": 0}
    assert {name: fields[name]["default"] for name in defaults} == defaults
    plain = post(server, "/v1/completions", GREEDY | {"prompt": "hello", "seed": 1}).json()
    stated = {name: fields[name]["default"] for name in fields if fields[name].get("default")}
    stated |= GREEDY | {"prompt": "hello", "seed": 1, "add_generation_prompt": None}
    del stated["add_generation_prompt"]
    assert post(server, "/v1/completions", stated).json()["choices"] == plain["choices"]


def test_browsers_of_other_origins(engine: EngineProcess, server: Server) -> None:
    origin = "http://page.example"
    asks = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    closed = httpx.options(f"{server.v1}/chat/completions", headers=asks)
    assert closed.status_code == 405
    assert "access-control-allow-origin" not in closed.headers
    with running_server(engine, api_key="s3cret", cors_origins=(origin,)) as opened:
        asked = httpx.options(f"{opened.v1}/chat/completions", headers=asks)
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == origin
        assert "authorization" in asked.headers["access-control-allow-headers"].lower()
        refused = post(opened, "/v1/chat/completions", CHAT, headers={"origin": origin})
        assert refused.status_code == 401  # and the page may read why
        assert refused.headers["access-control-allow-origin"] == origin
        other = httpx.get(f"{opened.url}/health", headers={"origin": "http://other.example"})
        assert other.headers.get("access-control-allow-origin") != "http://other.example"


def test_giant_prompts_at_once_cost_nothing(server: Server) -> None:
    with ThreadPoolExecutor(8) as pool:
        body = {"prompt": "hello the " * 9_000}
        calls = [pool.submit(post, server, "/v1/completions", body) for _ in range(8)]
        for call in calls:
            error = call.result().json()["error"]
            assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
            assert "bytes" in error["message"]
    turns = [{"role": "user", "content": "hello the " * 900}] * 10
    for path in ("/v1/chat/completions", "/tokenize"):
        refused = post(server, path, {"messages": turns})
        assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert post(server, "/detokenize", {"tokens": [5] * (CONTEXT + 1)}).status_code == 400


def test_what_is_not_there(server: Server) -> None:
    unknown = post(server, "/v1/completions", {"prompt": "a", "model": "other"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert "'tiny'" in unknown.json()["error"]["message"]
    assert httpx.get(f"{server.url}/v1/models/other").status_code == 404
    assert "/docs" in httpx.get(f"{server.url}/v2").json()["error"]["message"]
    wrong = httpx.get(f"{server.url}/v1/completions")
    assert (wrong.status_code, bool(wrong.json()["error"])) == (405, True)
    assert post(server, "/detokenize", {"tokens": [10**6]}).status_code == 400
    assert post(server, "/tokenize", {}).status_code == 400


def test_keys(engine: EngineProcess) -> None:
    with running_server(engine, api_key="s3cret") as guarded:
        for headers in ({}, {"authorization": "Bearer no"}, {"authorization": "s3cret"}):
            answer = httpx.get(f"{guarded.v1}/models", headers=headers)
            assert answer.status_code == 401
            assert "Bearer" in answer.json()["error"]["message"]
        assert post(guarded, "/tokenize", {"prompt": "a"}).status_code == 401
        assert httpx.get(f"{guarded.url}/health").status_code == 200
        client = openai.OpenAI(base_url=guarded.v1, api_key="s3cret", max_retries=0)
        assert client.models.list().data[0].id == "tiny"
        wrong = openai.OpenAI(base_url=guarded.v1, api_key="hölle", max_retries=0)
        with pytest.raises((openai.AuthenticationError, UnicodeEncodeError)):
            wrong.models.list()


def test_an_error_at_one_request_ends_no_other(server: Server) -> None:
    """What the engine's loop does not expect of a request is that request's error."""
    engine = cast("EngineProcess", server.service.engine)

    async def run() -> None:
        async for _ in engine.generate({"x": [1]}, cast("SamplingParams", None)):
            pass

    with ThreadPoolExecutor(4) as pool:
        request = long_request() | {"stream": False, "max_tokens": 100}
        calls = [pool.submit(post, server, "/v1/completions", request) for _ in range(4)]
        # on a busy machine some may have ended before all are there
        until(lambda: server.service.admission.num_open or any(call.done() for call in calls))
        with pytest.raises((RequestBroken, ValueError), match="None"):
            asyncio.run_coroutine_threadsafe(run(), engine._loop).result(60)
        assert [call.result().status_code for call in calls] == [200] * 4
    assert httpx.get(f"{server.url}/health").status_code == 200


def long_request() -> dict[str, Any]:
    return {"prompt": "hello", "max_tokens": CONTEXT - 8, "ignore_eos": True, "stream": True}


def test_a_client_that_goes_away_frees_its_pages(server: Server) -> None:
    def num_output() -> int:
        snapshot = server.service.engine.snapshot
        return snapshot.stats.num_output_tokens if snapshot else 0

    request, before = long_request(), num_output()
    with httpx.stream("POST", f"{server.v1}/completions", json=request) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert not is_idle(server)
    until(lambda: is_idle(server))
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.v1}/completions", json=request | {"stream": False}, timeout=0.2)
    until(lambda: is_idle(server))
    assert num_output() - before < 2 * request["max_tokens"]


def test_a_full_queue_refuses_and_the_rest_is_answered(server: Server) -> None:
    capacity = server.service.admission.capacity
    request = {"prompt": "the", "max_tokens": 120, "ignore_eos": True}
    with ThreadPoolExecutor(capacity * 4) as pool:
        calls = [pool.submit(post, server, "/v1/completions", request) for _ in range(capacity * 4)]
        answers = [call.result() for call in calls]
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= capacity
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert int(refused.headers["retry-after"]) > 0
    assert refused.json()["error"]["type"] == "rate_limit_error"


def test_a_request_that_takes_too_long(engine: EngineProcess) -> None:
    with running_server(engine, max_request_seconds=0.1) as hasty:
        request = {"prompt": "the", "max_tokens": 1000, "ignore_eos": True}
        answer = post(hasty, "/v1/completions", request)
        assert (answer.status_code, answer.headers["x-should-retry"]) == (408, "false")
        streamed = post(hasty, "/v1/completions", request | {"stream": True})
        last = streamed.text.strip().rpartition("data: ")[2]
        assert json.loads(last)["error"]["code"] == "time_limit"
        client = openai.OpenAI(base_url=hasty.v1, api_key="none", max_retries=0)
        with pytest.raises(openai.APIError):
            options = {"max_tokens": 1000, "extra_body": {"ignore_eos": True}}
            for _ in client.completions.create(prompt="a", model="tiny", stream=True, **options):
                pass
        until(lambda: is_idle(hasty))


def test_a_slow_reader_gets_everything(server: Server) -> None:
    request = long_request() | {"temperature": 0, "max_tokens": 400}
    whole = post(server, "/v1/completions", request | {"stream": False}).json()
    gate = threading.Event()
    text = ""
    with httpx.stream("POST", f"{server.v1}/completions", json=request, timeout=60) as answer:
        for line in answer.iter_lines():
            if not gate.is_set():
                until(lambda: is_idle(server))  # all is computed before the second read
                gate.set()
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    assert text == whole["choices"][0]["text"]


METRICS = [
    "time_to_first_token_seconds_count",
    "inter_token_latency_seconds_count",
    "request_time_per_output_token_seconds_count",
    "e2e_request_latency_seconds_count",
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_hits_total",
    "prefix_cache_queries_total",
    "num_preemptions_total",
    "kv_cache_saturated_elements_total",
    "nan_logits_rows_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total",
    "stage_time_seconds_total",
    "request_success_total",
    "engine_up",
]


def test_metrics_count(server: Server, client: Any) -> None:
    def read() -> dict[str, float]:
        lines = httpx.get(f"{server.url}/metrics").text.splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
        return {name.replace('model_name="tiny"', ""): float(value) for name, value in pairs}

    before = read()
    said = client.completions.create(
        prompt=PROMPTS[0] * 4, extra_body={"ignore_eos": True}, **GREEDY | {"max_tokens": 60}
    )
    until(lambda: is_idle(server))
    after = read()
    for name in METRICS:
        assert any(key.startswith(f"anabranch:{name}") for key in after), name

    def more(name: str) -> float:
        return after[f"anabranch:{name}"] - before.get(f"anabranch:{name}", 0)

    assert more("generation_tokens_total{}") == 60
    assert more("prompt_tokens_total{}") == said.usage.prompt_tokens
    assert more("time_to_first_token_seconds_count{}") == 1
    assert more("e2e_request_latency_seconds_count{}") == 1
    assert more('request_success_total{finished_reason="length",}') == 1
    drafted = more("spec_decode_num_draft_tokens_total{}")
    assert drafted >= more("spec_decode_num_accepted_tokens_total{}") > 0
    assert after["anabranch:kv_cache_usage_perc{}"] == 0
    stats = httpx.get(f"{server.url}/stats").json()
    assert sum(stats["accepted_at"]) == stats["accepted_tokens"]


def test_the_dashboard_asks_for_metrics_that_exist(server: Server) -> None:
    path = Path(__file__).parents[3] / "examples" / "grafana-dashboard.json"
    panels = json.loads(path.read_text())["panels"]
    asked = {
        name
        for panel in panels
        for target in panel["targets"]
        for name in re.findall(r"anabranch:\w+", target["expr"])
    }
    served = httpx.get(f"{server.url}/metrics").text
    assert len(asked) >= 15
    assert not {name for name in asked if f"{name}{{" not in served}
