"""Grammars by every path of the engine: the tokens are those of the plainest one, and valid.

Steps in flight with shapes of graphs, preemption and several ranks, each with every kind of
drafts; n > 1, penalties, logprobs, banned words and requests without a grammar beside them.
"""

from __future__ import annotations

import json
import re
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("jsonschema_rs")

from server_models import talking_model
from test_ranks import follow_as_on_gpu
from test_structured import DRAFTS, params
from tiny_models import as_on_gpu, assert_idle, pages

import anabranch.llm.engine.ranks as engine_ranks
from anabranch.llm.engine.llm import LLM
from anabranch.llm.sampling.params import SamplingParams

DIGITS = {"type": "integer", "minimum": 0, "maximum": 99}
LIST = {"json": {"type": "array", "items": DIGITS, "minItems": 8, "maxItems": 8}}
WORDS = r"(the |hello |[a-c]){6,12}\."
PENALTIES = {"presence_penalty": 0.5, "repetition_penalty": 1.2, "frequency_penalty": 0.3}
REQUESTS = {
    "plain": params(LIST),
    "several": params(LIST, n=3, logprobs=2, **PENALTIES),
    "greedy": params({"regex": WORDS}, temperature=0, logprobs=1),
    "narrow": params({"regex": WORDS}, top_k=5, top_p=0.9, bad_words=["ab", "c"], seed=2),
    "no grammar": SamplingParams(max_tokens=30, seed=5, ignore_eos=True),
    "no drafts": params({"regex": WORDS}, seed=11, speculate=False),
}
each_drafts = pytest.mark.parametrize("drafts", DRAFTS)


def build(drafts: str, **options: Any) -> LLM:
    speculative = DRAFTS[drafts]
    if speculative is not None and "model" in speculative:
        speculative = speculative | {"model": talking_model()}
    given = {"device": "cpu", "max_num_seqs": 8, "speculative": speculative} | options
    return LLM(talking_model(), **given)


def answers(llm: LLM) -> dict[str, list[tuple[list[int], list[int] | None]]]:
    """Tokens, and those that logprobs rank highest; all texts match."""
    found = llm.generate(["hello the hello the"] * len(REQUESTS), [*REQUESTS.values()])
    assert_idle(llm)
    for name, request in zip(REQUESTS, found, strict=True):
        assert request.error is None
        texts = [output.text for output in request.outputs]
        if name in ("plain", "several"):
            assert all(len(json.loads(text)) == 8 for text in texts)
        elif name != "no grammar":
            assert all(re.fullmatch(WORDS, text) for text in texts)
        if name == "narrow":
            assert not any(re.search("ab|c", text) for text in texts)
    return {
        name: [
            (output.token_ids, output.logprobs and [max(x, key=key(x)) for x in output.logprobs])
            for output in request.outputs
        ]
        for name, request in zip(REQUESTS, found, strict=True)
    }


def key(entry: Any) -> Any:
    return lambda token: entry[token].logprob


@cache
def expected() -> Any:
    return answers(build("none"))


@each_drafts
def test_steps_in_flight_with_shapes_of_graphs(drafts: str) -> None:
    llm = as_on_gpu(build(drafts))
    assert answers(llm) == expected()
    assert llm.stats.num_graph_steps > 0
    assert drafts == "none" or llm.stats.speculative.num_accepted_tokens > 0


@each_drafts
@pytest.mark.parametrize("in_flight", [False, True])
def test_preempted_sequences(drafts: str, in_flight: bool) -> None:
    held = pages(9) * (2 if "model" in drafts else 1)
    llm = build(drafts, kv_cache_gib=held, max_model_len=128)
    assert answers(as_on_gpu(llm) if in_flight else llm) == expected()
    assert llm.stats.num_preemptions > 0


def test_no_thread_has_a_grammar_after_a_step_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, waited = as_on_gpu(build("none")), list[bool]()
    engine = llm.engine

    class Threads:
        pinned = False

        def start(self, *_: Any) -> Any:
            return SimpleNamespace(result=lambda: waited.append(True))

    def fail() -> Any:
        raise OSError("the device is lost")

    for name in ("one", "two"):
        engine.add_request(name, [5, 6, 7], params(LIST))
    engine.step()
    with monkeypatch.context() as patched:
        patched.setattr(engine._launcher, "_mask_threads", Threads())
        patched.setattr(engine, "_land", fail)
        with pytest.raises(OSError, match="lost"):
            engine.step()
    assert waited == [True]


@pytest.mark.parametrize("way", ["tensor_parallel", "context_parallel"])
@pytest.mark.parametrize("drafts", ["none", "n-grams", "draft model"])
def test_several_ranks(way: str, drafts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_ranks, "follow_rank_0", follow_as_on_gpu)
    llm = build(drafts, kv_cache_gib=0.05, max_num_batched_tokens=64, **{way: 2})
    try:
        assert answers(as_on_gpu(llm)) == expected()
        assert llm.stats.num_graph_steps > 0
    finally:
        llm.close()


@pytest.mark.gpu
@each_drafts
def test_graphs_on_a_gpu(drafts: str) -> None:
    given: dict[str, Any] = {"device": "cuda", "dtype": "float32", "kv_cache_gib": 0.05}
    llm = build(drafts, **given)
    assert answers(llm) == answers(build("none", **given))
    assert llm.stats.num_graph_steps > 0
