"""Logprobs of prompts: complete with n > 1, sent once, bounded, written beside the event loop."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("transformers")
for needed in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(needed)
httpx = pytest.importorskip("httpx")

from forked_engine import forked_engine  # noqa: E402
from server_models import Server, engine_config, running_server  # noqa: E402
from tiny_models import VOCAB, source  # noqa: E402

from anabranch.llm.engine.config import EngineConfig  # noqa: E402
from anabranch.llm.engine.engine import Engine  # noqa: E402
from anabranch.llm.sampling.params import SamplingParams  # noqa: E402
from anabranch.llm.server.deltas import DeltaCursor, RequestDelta, join_deltas  # noqa: E402
from anabranch.llm.server.reply import SampledReply  # noqa: E402
from anabranch.llm.server.token_texts import TokenTexts  # noqa: E402

LENGTH = 900  # more than a step scores
PROMPT = [(place * 7 + place * place) % 200 + 20 for place in range(LENGTH)]
GREEDY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Its cache holds the prompt: sequences that score nothing have tokens at once."""
    engine = forked_engine(engine_config(speculative=None))
    with running_server(engine) as running:
        assert complete(running).status_code == 200
        yield running
    engine.close()


def complete(server: Server, **options: Any) -> Any:
    return httpx.post(f"{server.v1}/completions", json=GREEDY | options, timeout=60)


def test_prompts_that_share_a_step_are_scored_whole() -> None:
    """Second continuations have tokens before the first has all logprobs of the prompt."""
    model = source(max_position_embeddings=2048)
    engine = Engine(
        EngineConfig(model=model, device="cpu", max_num_batched_tokens=2048, max_num_seqs=16)
    )
    params = SamplingParams(n=2, max_tokens=4, ignore_eos=True, prompt_logprobs=0, temperature=0)
    told: dict[str, list[RequestDelta]] = {}
    cursors: dict[str, DeltaCursor] = {}
    requests = [
        engine.add_request(name, [(i * 7 + i * i + ord(name)) % VOCAB for i in range(200)], params)
        for name in "abc"
    ]
    for request in requests:
        told[request.request_id], cursors[request.request_id] = [], DeltaCursor(request)
    while engine.has_work:
        for request in engine.step():
            delta = cursors[request.request_id].delta()
            told[request.request_id] += [] if delta is None else [delta]
    for request in requests:
        first, *later = told[request.request_id]
        assert first.prompt_logprobs == request.output().prompt_logprobs
        assert len(first.prompt_logprobs or ()) == 200
        assert not any(delta.prompt_logprobs for delta in later)
        whole = join_deltas([first, *later])
        assert [choice.token_ids for choice in whole.choices] == [
            each.token_ids for each in request.output().outputs
        ]


def test_every_continuation_echoes_all_of_a_cached_prompt(server: Server) -> None:
    alone = complete(server, echo=True, logprobs=1).json()["choices"][0]["logprobs"]
    assert len(alone["tokens"]) == LENGTH + 2
    for stream in (False, True):
        answer = complete(server, n=2, echo=True, logprobs=1, stream=stream)
        assert answer.status_code == 200, answer.text[:300]
        lines = answer.text.removesuffix("data: [DONE]\n\n").strip().split("\n\n")
        objects = [json.loads(line.removeprefix("data: ")) for line in lines]
        found: dict[int, list[float]] = {0: [], 1: []}
        for each in objects:
            for choice in each["choices"]:
                found[choice["index"]] += choice["logprobs"]["token_logprobs"]
        for logprobs in found.values():
            assert logprobs[0] is None
            assert logprobs[1:] == pytest.approx(alone["token_logprobs"][1:], abs=1e-3)


def test_a_prompt_is_scored_once_for_all_its_choices(server: Server) -> None:
    choices = complete(server, prompt=[PROMPT, PROMPT[:7]], n=2, prompt_logprobs=1).json()[
        "choices"
    ]
    assert [len(choice.get("prompt_logprobs", ())) for choice in choices] == [LENGTH, 0, 7, 0]
    scored = choices[0]["prompt_logprobs"]
    assert scored[0] is None
    for token, entry in zip(PROMPT[1:], scored[1:], strict=True):
        assert entry[str(token)].keys() == {"logprob", "rank", "decoded_token"}
        assert 1 in {item["rank"] for item in entry.values()}


@pytest.mark.parametrize(
    ("options", "total"),
    [
        ({"prompt_logprobs": 1}, 2 * LENGTH),
        ({"prompt": [PROMPT, PROMPT], "prompt_logprobs": 0}, 2 * LENGTH),
        ({"echo": True, "logprobs": 0, "n": 2}, 2 * LENGTH),
    ],
)
def test_answers_with_too_many_logprobs_are_refused(
    server: Server, options: dict[str, Any], total: int
) -> None:
    engine = server.service.engine
    with running_server(engine, max_prompt_logprobs=total - 1) as narrow:
        answer = complete(narrow, **options)
        assert answer.status_code == 400
        say = f"{total} logprobs of prompts, the most is {total - 1}"
        assert say in answer.json()["error"]["message"]
    with running_server(engine, max_prompt_logprobs=total) as wide:
        assert complete(wide, **options).status_code == 200


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the threads that make what takes long."""
    names: set[str] = set()

    def noted(call: Any) -> Any:
        def call_and_note(*arguments: Any, **options: Any) -> Any:
            names.add(threading.current_thread().name.rpartition("_")[0])
            return call(*arguments, **options)

        return call_and_note

    method = "_prompt_logprobs"
    monkeypatch.setattr(SampledReply, method, noted(getattr(SampledReply, method)))
    monkeypatch.setattr(TokenTexts, "text_of", noted(TokenTexts.text_of))
    return names


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt_logprobs": 1}),
        ("/v1/completions", {"echo": True, "logprobs": 1}),
        ("/v1/completions", {"echo": True, "logprobs": 1, "stream": True, "max_tokens": 1}),
        ("/v1/chat/completions", {"prompt_logprobs": 20}),
        ("/tokenize", {"prompt": "hello €" * 500, "return_token_strs": True}),
    ],
)
def test_what_takes_long_is_written_beside_the_event_loop(
    server: Server, writers: set[str], path: str, body: dict[str, Any]
) -> None:
    if path == "/v1/completions":
        body = GREEDY | body
    elif "chat" in path:
        turn = {"role": "user", "content": "hello the " * 60}
        body = {"messages": [turn], "max_tokens": 2} | body
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text[:300]
    assert writers == {"write-answers"}
