"""Tokens are the same however a request is run; options have their effect, or are refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")

from tiny_models import (
    EOS,
    GREEDY,
    PAGE_BYTES,
    VOCAB,
    CalledGraphs,
    as_on_gpu,
    assert_idle,
    blurred_source,
    eager,
    eager_logprobs,
    one_by_one,
    outputs,
    pages,
    random_prompts,
    source,
    tiny,
)

from anabranch.llm.engine import launch as launch_module
from anabranch.llm.engine import launched as launched_module
from anabranch.llm.engine import request as request_module
from anabranch.llm.engine.build import _capture
from anabranch.llm.engine.config import EngineConfig, SpeculativeConfig
from anabranch.llm.engine.llm import LLM
from anabranch.llm.engine.text_stream import TextStream
from anabranch.llm.sampling.logprobs import prompt_logprobs
from anabranch.llm.sampling.params import SamplingParams

NGRAM = {"method": "ngram", "min_ngram": 1, "adaptive": False}
DRAFT = {"method": "draft", "model": blurred_source(), "adaptive": False}
TREE = {"tree_width": 3, "num_drafts": 6}
ENGINES: dict[str, dict[str, Any]] = {
    "batched": {},
    "no prefix reuse": {"prefix_caching": False},
    "chunked": {"max_num_batched_tokens": 9, "max_num_seqs": 5},
    "pages of 5": {"page_size": 5},
    "separate projections": {"join_projections": False},
    "preempted": {"kv_cache_gib": pages(9), "max_model_len": 120},
    "n-gram": {"speculative": NGRAM},
    "n-gram, adaptive": {"speculative": NGRAM | {"adaptive": True}},
    "n-gram, expanded": {"speculative": NGRAM | {"scorer": "batch-expansion"}},
    "n-gram, chunked": {
        "speculative": NGRAM,
        "max_num_batched_tokens": 9,
        "max_num_seqs": 5,
    },
    "n-gram, preempted": {
        "speculative": NGRAM,
        "kv_cache_gib": pages(9),
        "max_model_len": 120,
    },
    "draft": {"speculative": DRAFT},
    "draft, adaptive": {"speculative": DRAFT | {"adaptive": True}},
    "draft, expanded": {"speculative": DRAFT | {"scorer": "batch-expansion"}},
    "draft, chunked": {"speculative": DRAFT, "max_num_batched_tokens": 9, "max_num_seqs": 5},
    "draft, preempted": {
        "speculative": DRAFT,
        "kv_cache_gib": pages(9, 2 * PAGE_BYTES),
        "max_model_len": 120,
    },
    "one draft": {"speculative": DRAFT | {"num_drafts": 1}},
    "n-gram tree, chunked": {
        "speculative": NGRAM | TREE,
        "max_num_batched_tokens": 9,
        "max_num_seqs": 5,
    },
}
PROMPTS = [*random_prompts(), *random_prompts(1, (5, 5))]


@pytest.fixture(scope="module")
def plain() -> LLM:
    return tiny()


@pytest.fixture(scope="module")
def expected(plain: LLM) -> list[list[int]]:
    return one_by_one(plain, PROMPTS)


def test_tokens_are_those_of_transformers(expected: list[list[int]]) -> None:
    model = eager(source())
    for prompt, ours in zip(PROMPTS, expected, strict=True):
        ids = torch.tensor([prompt])
        theirs = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, min_new_tokens=24,
            do_sample=False, eos_token_id=None,
        )  # fmt: skip
        assert theirs[0, len(prompt) :].tolist() == ours


@pytest.mark.parametrize("length", [33, 40, 41, 64, 65])
def test_a_prompt_by_a_graph(length: int) -> None:
    """Prompts of 33 to 64 tokens have graphs of 40 and 64; chunks of 9 tokens and 65 have none."""
    prompt = random_prompts(1, (length, length))[1:]
    expected = outputs(tiny(), prompt)
    llm = as_on_gpu(tiny(page_size=16))
    assert outputs(llm, prompt) == expected
    stats = llm.stats
    assert stats.num_steps - stats.num_graph_steps == (length > 64)
    again = outputs(llm, [prompt[0] + prompt[0][:34]])  # most of it is in the cache
    assert again == outputs(tiny(), [prompt[0] + prompt[0][:34]])
    chunked = as_on_gpu(tiny(max_num_batched_tokens=36, max_num_seqs=5))
    assert outputs(chunked, prompt) == expected


@pytest.mark.parametrize("like_gpu", [False, True], ids=["in turn", "in flight, by graphs"])
@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_tokens_are_the_same(
    options: dict[str, Any], like_gpu: bool, expected: list[list[int]]
) -> None:
    llm = tiny(**options)
    if like_gpu:
        as_on_gpu(llm)
    assert outputs(llm, PROMPTS) == expected
    assert outputs(llm, PROMPTS) == expected, "with the cache as the first round left it"
    stats = llm.stats
    assert stats.num_output_tokens == 2 * 24 * len(PROMPTS)
    if "kv_cache_gib" in options:
        assert stats.num_preemptions > 0
    elif options.get("prefix_caching", True):
        cached = sum((len(p) - 1) // llm.engine.limits.page_size for p in PROMPTS)
        assert stats.num_cached_tokens >= cached * llm.engine.limits.page_size
        computed = stats.num_prompt_tokens + stats.num_cached_tokens
        assert computed == 2 * sum(map(len, PROMPTS))
    if "speculative" in options:
        assert stats.speculative.num_accepted_tokens > 0
    assert (stats.num_graph_steps > 0) == like_gpu


@pytest.mark.parametrize("speculative", [NGRAM, DRAFT], ids=["n-gram", "draft"])
def test_prompts_as_long_as_a_verification(plain: LLM, speculative: Any) -> None:
    """A graph of five tokens a sequence fits a prompt of five as well."""
    prompts = random_prompts(7, (5, 15, 5, 4, 15, 6, 2))
    prompts = [prompt[:5] for prompt in prompts]
    llm = as_on_gpu(tiny(speculative=speculative, prefix_caching=False))
    expected = one_by_one(plain, prompts)
    assert one_by_one(llm, prompts) == expected
    assert outputs(llm, prompts) == expected


SEEDED: dict[str, Any] = {
    "plain": None,
    "n-gram": NGRAM,
    "draft": DRAFT,
    "draft, adaptive": DRAFT | {"adaptive": True},
}


@pytest.mark.parametrize("like_gpu", [False, True], ids=["in turn", "in flight"])
@pytest.mark.parametrize("speculative", SEEDED.values(), ids=SEEDED)
def test_a_seed_reproduces_in_any_batch(plain: LLM, speculative: Any, like_gpu: bool) -> None:
    """With any drafts or none, in any order, under page pressure."""
    filters = {"top_p": 0.9, "min_p": 0.01, "top_k": 30}
    penalties = {"presence_penalty": 0.3, "repetition_penalty": 1.1}
    options: list[dict[str, Any]] = [{}, {"temperature": 0.7, **filters, **penalties}, filters]
    params = [
        SamplingParams(seed=seed, max_tokens=16, ignore_eos=True, **options[seed % 3])
        for seed, _ in enumerate(PROMPTS)
    ]
    alone = one_by_one(plain, PROMPTS, params)
    by_draft = speculative is not None and speculative["method"] == "draft"
    room = pages(9, PAGE_BYTES * (2 if by_draft else 1))
    llm = tiny(speculative=speculative, kv_cache_gib=room, max_model_len=120)
    if like_gpu:
        as_on_gpu(llm)
    assert outputs(llm, PROMPTS, params) == alone
    assert outputs(llm, PROMPTS[::-1], params[::-1]) == alone[::-1]
    assert llm.stats.num_preemptions > 0
    if by_draft:
        assert llm.stats.speculative.num_accepted_tokens > 0


def test_the_engines_seed_is_that_of_requests_without_one() -> None:
    params = SamplingParams(max_tokens=12)
    first, second = (outputs(tiny(seed=3), PROMPTS, params) for _ in range(2))
    assert first == second == outputs(tiny(), PROMPTS, replace(params, seed=3))
    assert first != outputs(tiny(seed=4), PROMPTS, params)


@pytest.mark.parametrize("like_gpu", [False, True])
@pytest.mark.parametrize("speculative", [None, NGRAM, DRAFT], ids=["plain", "n-gram", "draft"])
def test_cancelled_neighbours_disturb_nobody(
    speculative: Any, like_gpu: bool, expected: list[list[int]]
) -> None:
    llm = tiny(speculative=speculative, max_num_seqs=6)
    if like_gpu:
        as_on_gpu(llm)
    engine = llm.engine
    requests = [engine.add_request(str(i), p, GREEDY) for i, p in enumerate(PROMPTS)]
    for number in range(1000):
        if not engine.has_work:
            break
        engine.step()
        aborted = engine.abort(str(3 * number))
        assert aborted is None or aborted.seqs[0].finish_reason in ("abort", "length")
    assert_idle(llm)
    for number, request in enumerate(requests):
        tokens = request.output().outputs[0].token_ids
        if number % 3:
            assert tokens == expected[number]
        else:
            assert tokens == expected[number][: len(tokens)]
    assert engine.abort("0") is None


OPTIONS = st.fixed_dictionaries(
    {
        "page_size": st.sampled_from([3, 16]),
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.integers(6, 40),
        "prefix_caching": st.booleans(),
        "speculative": st.sampled_from(
            [
                None,
                NGRAM,
                NGRAM | {"num_drafts": 2, "scorer": "batch-expansion"},
                NGRAM | {"adaptive": True},
                DRAFT | {"num_drafts": 3},
                DRAFT | {"adaptive": True, "scorer": "batch-expansion"},
            ]
        ),
    }
)
REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 50),  # tokens of the prompt
        st.integers(1, 20),  # and of the output
        st.booleans(),  # whether it is greedy
        st.sampled_from([None, 0, 2]),  # prompt_logprobs
        st.integers(0, 12),  # the step before which it comes
        st.one_of(st.none(), st.integers(1, 30)),  # and the one before which it goes
    ),
    min_size=1,
    max_size=7,
)


@settings(max_examples=15)
@given(options=OPTIONS, requests=REQUESTS, num_pages=st.integers(26, 60), like_gpu=st.booleans())
def test_any_mix_gives_what_each_gives_alone(
    plain: LLM, options: dict[str, Any], requests: Any, num_pages: int, like_gpu: bool
) -> None:
    draft = options["speculative"] and options["speculative"]["method"] == "draft"
    a_page = PAGE_BYTES * (2 if draft else 1) * options["page_size"] // 16
    llm = tiny(max_model_len=75, kv_cache_gib=pages(num_pages, a_page), **options)
    if like_gpu:
        as_on_gpu(llm)
    engine = llm.engine
    prompts = [([7, 8, 9, 7, 8] * 10)[:half] + [half + 2] * (size - half)
               for size, *_ in requests for half in [size // 2]]  # fmt: skip
    params = [
        SamplingParams(
            temperature=0 if greedy else 0.8,
            seed=number,
            max_tokens=tokens,
            prompt_logprobs=logprobs,
            logprobs=0,
            ignore_eos=True,
        )
        for number, (_, tokens, greedy, logprobs, *_) in enumerate(requests)
    ]
    added: dict[int, Any] = {}
    step = 0
    while engine.has_work or len(added) < len(requests):
        for number, (*_, start, stop) in enumerate(requests):
            if start == step:
                added[number] = engine.add_request(str(number), prompts[number], params[number])
            if stop == step:
                engine.abort(str(number))
        engine.step()
        step += 1
        assert step < 2000
    assert_idle(llm)
    for number, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        (alone,) = plain.generate([prompt], one)
        found = added[number].output()
        tokens = found.outputs[0].token_ids
        assert tokens == alone.outputs[0].token_ids[: len(tokens)]
        if found.outputs[0].finish_reason != "abort":
            assert len(tokens) == one.max_tokens
            assert [*map(_rounded, found.prompt_logprobs or [])] == [
                *map(_rounded, alone.prompt_logprobs or [])
            ]


def _rounded(entry: Any) -> Any:
    if entry is None:
        return None
    return {token: pytest.approx(one.logprob, abs=1e-4) for token, one in entry.items()}


# Options of a request, each with and without drafts.


@pytest.fixture(scope="module", params=[None, NGRAM, DRAFT], ids=["plain", "n-gram", "draft"])
def llm(request: pytest.FixtureRequest) -> LLM:
    return tiny(speculative=request.param)


PROMPT = PROMPTS[5]


def answer(llm: LLM, prompt: Any = PROMPT, **options: Any) -> Any:
    found = llm.generate([prompt], SamplingParams(**{"temperature": 0, "max_tokens": 24} | options))
    assert_idle(llm)
    return found[0]


def test_n(llm: LLM) -> None:
    found = answer(llm, n=3, temperature=1.0, seed=5, ignore_eos=True).outputs
    assert [one.index for one in found] == [0, 1, 2]
    assert len({tuple(one.token_ids) for one in found}) == 3
    again = answer(llm, n=3, temperature=1.0, seed=5, ignore_eos=True).outputs
    assert [one.token_ids for one in found] == [one.token_ids for one in again]
    first = answer(llm, temperature=1.0, seed=5, ignore_eos=True).outputs[0]
    assert found[0].token_ids == first.token_ids


@pytest.mark.parametrize(
    "changes",
    [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-6}],
    ids=lambda changes: next(iter(changes)),
)
def test_filters_that_leave_one_token_are_greedy(llm: LLM, changes: dict[str, Any]) -> None:
    best = answer(llm, ignore_eos=True).outputs[0].token_ids
    free = answer(llm, temperature=2.0, seed=1, ignore_eos=True).outputs[0].token_ids
    assert free != best
    options = {"temperature": 2.0, "seed": 1, "ignore_eos": True} | changes
    assert answer(llm, **options).outputs[0].token_ids == best


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_penalties(plain: LLM, llm: LLM, name: str) -> None:
    best = answer(llm, ignore_eos=True, max_tokens=60).outputs[0].token_ids
    fined = answer(llm, ignore_eos=True, max_tokens=60, **{name: 1.9}).outputs[0].token_ids
    assert fined != best and len(set(fined)) > len(set(best))
    same = answer(plain, ignore_eos=True, max_tokens=60, **{name: 1.9}).outputs[0].token_ids
    assert fined == same


def test_logit_bias(llm: LLM) -> None:
    assert answer(llm, logit_bias={42: 100.0}, max_tokens=9).outputs[0].token_ids == [42] * 9
    best = answer(llm).outputs[0].token_ids
    assert best[0] not in answer(llm, logit_bias={best[0]: -100.0}).outputs[0].token_ids


def test_stop_token_ids(llm: LLM) -> None:
    best = answer(llm, ignore_eos=True).outputs[0].token_ids
    stop = best[9]
    found = answer(llm, stop_token_ids=[stop, 96], ignore_eos=True).outputs[0]
    assert found.token_ids == best[: best.index(stop) + 1]
    assert (found.finish_reason, found.stop_reason) == ("stop", stop)


def test_eos_min_tokens_and_ignore_eos(llm: LLM) -> None:
    to_eos = {"logit_bias": {EOS: 100.0}}
    found = answer(llm, **to_eos).outputs[0]
    assert (found.token_ids, found.finish_reason, found.stop_reason) == ([EOS], "stop", None)
    found = answer(llm, ignore_eos=True, max_tokens=5, **to_eos).outputs[0]
    assert (found.token_ids, found.finish_reason) == ([EOS] * 5, "length")
    found = answer(llm, min_tokens=7, **to_eos).outputs[0]
    assert EOS not in found.token_ids[:7] and found.token_ids[7:] == [EOS]
    stop = found.token_ids[0]
    found = answer(llm, min_tokens=7, stop_token_ids=[stop], ignore_eos=True).outputs[0]
    assert stop not in found.token_ids[:7]


@pytest.mark.parametrize("tokens", [1, 2, 6, None])
def test_max_tokens(llm: LLM, tokens: int | None) -> None:
    found = answer(llm, max_tokens=tokens, ignore_eos=True).outputs[0]
    assert len(found.token_ids) == (256 - len(PROMPT) if tokens is None else tokens)
    assert found.finish_reason == "length"


def test_truncate_prompt_tokens(llm: LLM) -> None:
    found = answer(llm, truncate_prompt_tokens=11)
    assert found.prompt_token_ids == PROMPT[-11:]
    assert found.outputs[0].token_ids == answer(llm, PROMPT[-11:]).outputs[0].token_ids
    assert answer(llm, truncate_prompt_tokens=99).prompt_token_ids == PROMPT


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_the_models_own(llm: LLM, temperature: float) -> None:
    found = answer(
        llm, temperature=temperature, seed=0, logprobs=3, ignore_eos=True, logit_bias={5: 1.0}
    ).outputs[0]
    exact = eager_logprobs(eager(source()), PROMPT + found.token_ids)
    total = 0.0
    for place, (token, entry) in enumerate(zip(found.token_ids, found.logprobs, strict=True)):
        _check_entry(entry, exact[len(PROMPT) - 1 + place], token, 3)
        total += entry[token].logprob
    assert found.cumulative_logprob == pytest.approx(total)
    bare = answer(llm, logprobs=0).outputs[0]
    assert [list(entry) for entry in bare.logprobs] == [[token] for token in bare.token_ids]


def _check_entry(entry: Any, exact: torch.Tensor, token: int, wanted: int) -> None:
    best = exact.topk(wanted).indices.tolist()
    assert set(entry) == {*best, token}
    for each, logprob in entry.items():
        assert logprob.logprob == pytest.approx(exact[each].item(), abs=1e-4)
        assert logprob.rank == int((exact > exact[each]).sum()) + 1


@pytest.mark.parametrize("budget", [1024, 20])
@pytest.mark.parametrize("speculative", [None, NGRAM, DRAFT], ids=["plain", "n-gram", "draft"])
@pytest.mark.parametrize("like_gpu", [False, True])
def test_prompt_logprobs(budget: int, speculative: Any, like_gpu: bool) -> None:
    llm = tiny(max_num_batched_tokens=budget, speculative=speculative)
    if like_gpu:
        as_on_gpu(llm)
    prompts = [*PROMPTS[-6:], PROMPT]  # the last would be found in the cache
    params = [replace(GREEDY, prompt_logprobs=i % 4, n=1 + i % 2) for i, _ in enumerate(prompts)]
    best = outputs(llm, prompts)
    for i, found in enumerate(llm.generate(prompts, params)):
        assert found.outputs[-1].token_ids == best[i]
        assert found.prompt_logprobs is not None and found.prompt_logprobs[0] is None
        assert len(found.prompt_logprobs) == len(prompts[i])
        exact = eager_logprobs(eager(source()), prompts[i])
        for place, entry in enumerate(found.prompt_logprobs[1:]):
            _check_entry(entry, exact[place], prompts[i][place + 1], i % 4)
    assert_idle(llm)


def counted_targets(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of prompts whose logprobs were computed."""
    targets: list[int] = []

    def counted(rows: Any, tokens: torch.Tensor, wanted: int) -> Any:
        targets.extend(tokens.tolist())
        return prompt_logprobs(rows, tokens, wanted)

    monkeypatch.setattr(launch_module, "prompt_logprobs", counted)
    return targets


def test_prompt_logprobs_are_made_once_for_all_continuations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = tiny(max_num_seqs=2)
    targets = counted_targets(monkeypatch)
    found = answer(llm, n=5, temperature=1.0, seed=2, prompt_logprobs=1)
    assert targets == PROMPT[1:]
    assert found.prompt_logprobs == answer(tiny(), prompt_logprobs=1).prompt_logprobs
    assert llm.stats.num_cached_tokens == 3 * 32, "two pages of each of the later three"


def test_prompt_logprobs_of_a_preempted_prompt() -> None:
    llm = tiny(kv_cache_gib=pages(6), max_model_len=96, max_num_batched_tokens=20)
    params = replace(GREEDY, prompt_logprobs=1, max_tokens=20)
    prompts = [PROMPTS[6][:size] for size in (14, 14, 63)]
    for prompt, found in zip(prompts, llm.generate(prompts, params), strict=True):
        exact = eager_logprobs(eager(source()), prompt)
        assert found.prompt_logprobs is not None and len(found.prompt_logprobs) == len(prompt)
        for place, entry in enumerate(found.prompt_logprobs[1:]):
            assert entry is not None
            _check_entry(entry, exact[place], prompt[place + 1], 1)
    assert llm.stats.num_preemptions > 0


def test_prompt_logprobs_that_are_known_are_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a sequence that is preempted after its prompt."""
    llm, prompt = tiny(kv_cache_gib=pages(6), max_model_len=96), PROMPTS[6][:40]
    targets = counted_targets(monkeypatch)
    llm.generate([prompt, prompt], replace(GREEDY, prompt_logprobs=1, max_tokens=20))
    assert llm.stats.num_preemptions > 0
    assert targets == [*prompt[1:], *prompt[1:]]


def test_speculate_is_the_requests_choice(llm: LLM) -> None:
    before = llm.stats.speculative.num_draft_tokens
    best = answer(llm, speculate=False).outputs[0]
    assert llm.stats.speculative.num_draft_tokens == before
    assert set(best.origins) == {0}
    drafted = answer(llm, speculate=True if llm.engine.config.speculative else None).outputs[0]
    assert drafted.token_ids == best.token_ids
    if llm.engine.config.speculative:
        assert llm.stats.speculative.num_draft_tokens > before
        assert len(drafted.steps) == len(drafted.token_ids) >= len(set(drafted.steps))


def test_streaming_grows_and_ends(llm: LLM) -> None:
    parts = [found.outputs[0] for found in llm.stream(PROMPT, GREEDY)]
    for part, after in pairwise(parts):
        assert after.token_ids[: len(part.token_ids)] == part.token_ids
    assert parts[-1].token_ids == outputs(llm, [PROMPT])[0]
    assert [part.finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
    opened = llm.stream(PROMPT, GREEDY)
    next(opened)
    opened.close()
    assert_idle(llm)


def test_streams_may_take_turns(llm: LLM, expected: list[list[int]]) -> None:
    """Whoever's step emits them, each loop sees its own tokens, the last ones too."""
    short, long = llm.stream(PROMPTS[3], replace(GREEDY, max_tokens=9)), llm.stream(PROMPT, GREEDY)
    next(short)
    next(long)
    assert [*short][-1].outputs[0].token_ids == expected[3][:9]
    assert llm.engine.has_work, "the longer one goes on by itself"
    assert outputs(llm, [PROMPTS[3]]) == [expected[3]]
    assert [*long][-1].outputs[0].token_ids == expected[5]
    assert_idle(llm)


def test_an_interrupted_call_leaves_nothing_behind(plain: LLM) -> None:
    def interrupt(num_tokens: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        plain.generate(PROMPTS, GREEDY, advance=interrupt)
    assert_idle(plain)


def test_a_token_outside_the_vocabulary_ends_nothing(expected: list[list[int]]) -> None:
    llm = LLM(source(eos_token_id=VOCAB), device="cpu")
    params = replace(GREEDY, ignore_eos=False, min_tokens=2)
    assert outputs(llm, [PROMPT], params) == [expected[5]]


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "prompt is empty"),
        ([3, VOCAB], {}, f"token id {VOCAB} is not in the vocabulary"),
        ([3, -1], {}, "token id -1"),
        ([3, 2.5], {}, "2.5"),
        ([3, True], {}, "True"),
        (None, {}, "text or a list of token ids, got NoneType"),
        (7, {}, "text or a list of token ids, got int 7"),
        (b"text", {}, "got bytes"),
        ({"prompt": "text"}, {}, "got dict {'prompt': 'text'}"),
        ([3, {"id": 4}], {}, "holds integers, got {'id': 4}"),
        ([5] * 256, {}, "256 tokens.*allows 255"),
        ("text", {}, "no tokenizer"),
        ([3], {"stop": "x"}, "no tokenizer"),
        ([3], {"logit_bias": {VOCAB: 1.0}}, f"token id {VOCAB}"),
        ([3], {"stop_token_ids": [500]}, "token id 500"),
        ([3], {"logprobs": 98}, "logprobs 98"),
        ([3], {"prompt_logprobs": 98}, "prompt_logprobs 98"),
        ([3], {"speculate": True}, "speculate=True needs .*SpeculativeConfig"),
    ],
)
def test_one_bad_request_and_none_is_run(
    plain: LLM, prompt: Any, options: dict[str, Any], message: str
) -> None:
    bad = SamplingParams(**options)
    with pytest.raises(ValueError, match=message):
        plain.generate([PROMPT, prompt, PROMPT], [GREEDY, bad, GREEDY])
    assert_idle(plain)


def test_refusals_of_a_call(plain: LLM) -> None:
    with pytest.raises(ValueError, match="2 prompts but 1"):
        plain.generate([PROMPT, PROMPT], [GREEDY])
    for prompt in (None, 7, b"text", {"text": 1}, {}):
        with pytest.raises(ValueError, match="a prompt is text or a list of token ids, got"):
            plain.generate(prompt, GREEDY)  # type: ignore[arg-type]
    for params in (7, {"n": 1}, [None]):
        with pytest.raises(ValueError, match=r"SamplingParams.*, got"):
            plain.generate([PROMPT], params)  # type: ignore[arg-type]
    assert_idle(plain)
    with pytest.raises(ValueError, match="chat template"):
        plain.chat_prompt([{"role": "user", "content": "hi"}])
    assert plain.generate([], GREEDY) == []
    plain.engine.add_request("twice", PROMPT, GREEDY)
    with pytest.raises(ValueError, match="'twice' is running already"):
        plain.engine.add_request("twice", PROMPT, GREEDY)
    plain.engine.abort("twice")
    assert_idle(plain)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beams": 4}, "beams"),
        ({"speculative": {"method": "oracle"}}, "oracle"),
        ({"speculative": {"methd": "ngram"}}, "unknown options of speculative: methd"),
        ({"speculative": "oracle"}, "oracle"),
        ({"speculative": "draft"}, "needs model"),
        ({"speculative": 4}, "speculative must be .* got 4"),
        ({"speculative": {"num_drafts": "4"}}, "num_drafts must be an integer, got '4'"),
        ({"speculative": {"method": "draft"}}, "needs model"),
        ({"speculative": {"model": "x"}}, "takes no model"),
        ({"speculative": {"num_drafts": 0}}, "num_drafts"),
        ({"speculative": {"scorer": "guess"}}, "guess"),
        ({"speculative": {"min_ngram": 5}}, "min_ngram"),
        ({"speculative": DRAFT | {"model": source(vocab_size=96)}}, "vocabulary of 96"),
        ({"kv_cache_gib": 1e-7}, "GiB"),
        ({"kv_cache_gib": pages(3), "max_model_len": 64}, "max_model_len 64 needs"),
        ({"kv_cache_gib": -1}, "kv_cache_gib"),
        ({"max_model_len": 257}, "257 exceeds .*'s 256"),
        (
            {"speculative": DRAFT | {"model": source(max_position_embeddings=64)}}
            | {"max_model_len": 65},
            "65 exceeds .*'s 64",
        ),
        ({"seed": 2**63}, f"seed .* {2**63}"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_batched_tokens": 4, "max_num_seqs": 5}, "max_num_batched_tokens 4"),
        ({"dtype": "int4"}, "int4"),
        ({"gpu_memory_utilization": 1.5}, "1.5"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    error = TypeError if "beams" in options else ValueError
    with pytest.raises(error, match=message):
        tiny(**options)


@pytest.mark.parametrize("like_gpu", [False, True], ids=["in turn", "in flight"])
def test_scored_prompts_keep_few_rows_of_logits(plain: LLM, like_gpu: bool) -> None:
    """However long prompts are, and however many of them are scored at once."""
    llm = tiny()
    if like_gpu:
        as_on_gpu(llm)
    llm.engine.scheduler.max_num_scored = 8
    rows: list[int] = []
    head = llm.engine._launcher._built.target.model.get_output_embeddings()
    head.register_forward_hook(lambda _, __, logits: rows.append(logits.shape[1]))
    params = replace(GREEDY, prompt_logprobs=2, max_tokens=3)
    prompts = [*PROMPTS, PROMPTS[3] * 4]
    found = llm.generate(prompts, [params, *[replace(params, seed=1)] * (len(prompts) - 1)])
    assert max(rows) <= 8 + len(prompts), "and one for each that samples"
    for ours, theirs in zip(found, plain.generate(prompts, params), strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        assert [*map(_rounded, ours.prompt_logprobs or [])] == [
            *map(_rounded, theirs.prompt_logprobs or [])
        ]
    assert_idle(llm)


@pytest.mark.parametrize(
    ("options", "numbers"),
    [({}, {6}), ({"adaptive": True}, {1, 3, 6}), ({"tree_width": 3}, {1, 3, 6})],
    ids=["chain", "adaptive", "tree"],
)
def test_numbers_of_drafts_that_have_graphs(options: dict[str, Any], numbers: set[int]) -> None:
    """Passes of the draft model; trees are as deep as they were accepted."""
    llm = tiny(speculative=DRAFT | {"num_drafts": 6} | options, max_num_seqs=2)
    built = llm.engine._launcher._built
    runner, chain = built.runner, built.draft
    assert chain is not None
    runner.graphs, runner.prompt_graphs, chain.graphs = (CalledGraphs() for _ in range(3))
    _capture(llm.engine.config, built.limits, runner, chain, lambda *_: None)
    assert {key.num_drafts for key in chain.graphs} == numbers


def test_speculation_by_the_name_of_its_method() -> None:
    assert EngineConfig(speculative="ngram").speculative == SpeculativeConfig()  # type: ignore[arg-type]
    assert EngineConfig(speculative="off").speculative is None  # type: ignore[arg-type]
    assert tiny(speculative="ngram").engine.limits.max_drafts == SpeculativeConfig().num_drafts


def test_little_memory_shortens_the_context() -> None:
    llm = tiny(kv_cache_gib=pages(3))
    assert llm.engine.limits.max_model_len == 48
    assert len(outputs(llm, [PROMPTS[5]], replace(GREEDY, max_tokens=None))[0]) == 48 - len(PROMPT)


# What goes wrong with one request ends that one


@pytest.fixture(params=[False, True], ids=["in turn", "in flight"])
def served(request: pytest.FixtureRequest) -> LLM:
    llm = tiny(max_num_seqs=4)
    return as_on_gpu(llm) if request.param else llm


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("of one request")


def answers_beside_a_failure(llm: LLM, expected: list[list[int]]) -> Any:
    """Answer all prompts, of which the third has a seed; it alone may fail."""
    params = [replace(GREEDY, logprobs=2, prompt_logprobs=1) for _ in PROMPTS]
    params[2] = replace(params[2], n=2, seed=77)
    found = llm.generate(PROMPTS, params)
    assert_idle(llm)
    for number, (answer, tokens) in enumerate(zip(found, expected, strict=True)):
        if number != 2:
            assert answer.error is None and answer.outputs[0].token_ids == tokens
            assert answer.outputs[0].finish_reason == "length"
    failed = found[2]
    assert failed.finished and failed.error == "RuntimeError: of one request"
    assert [one.finish_reason for one in failed.outputs] == ["error", "error"]
    return failed


def test_a_failing_text_ends_its_request(
    served: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    push = TextStream.push
    add = served.engine.add_request

    def add_request(*args: Any) -> Any:
        request = add(*args)
        for stream in request.texts if request.params.seed == 77 else ():
            bad.add(stream)
        return request

    def push_or_fail(self: TextStream, token: int, **options: Any) -> bool:
        return broken() if self in bad else push(self, token, **options)

    bad: set[TextStream] = set()
    monkeypatch.setattr(served.engine, "add_request", add_request)
    monkeypatch.setattr(TextStream, "push", push_or_fail)
    failed = answers_beside_a_failure(served, expected)
    assert failed.outputs[0].token_ids == expected[2][:1]


@pytest.mark.parametrize("where", ["sampled_entry", "top_entries"], ids=["output", "prompt"])
def test_failing_logprobs_end_their_request(
    served: LLM, where: str, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = request_module if where == "sampled_entry" else launched_module
    make, land = getattr(module, where), served.engine._land_run
    landing: list[Any] = []

    def land_run(run: Any, *args: Any) -> None:
        landing[:] = [run.seq]
        land(run, *args)

    def make_or_fail(*args: Any) -> Any:
        return broken() if landing[0].params.seed == 77 else make(*args)

    monkeypatch.setattr(served.engine, "_land_run", land_run)
    monkeypatch.setattr(module, where, make_or_fail)
    assert answers_beside_a_failure(served, expected).outputs[0].token_ids == []


def test_a_row_that_cannot_be_set_up_ends_its_request(
    served: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = served.engine._launcher._sampler
    add = sampler.add

    def add_or_fail(row: int, params: SamplingParams, *args: Any) -> None:
        return broken() if params.seed == 77 else add(row, params, *args)

    monkeypatch.setattr(sampler, "add", add_or_fail)
    assert answers_beside_a_failure(served, expected).outputs[0].token_ids == []
    monkeypatch.undo()
    assert outputs(served, PROMPTS) == expected


@pytest.mark.parametrize("speculative", [None, NGRAM], ids=["plain", "drafts"])
@pytest.mark.parametrize("like_gpu", [False, True], ids=["in turn", "in flight"])
def test_logits_that_are_all_nan_end_their_request(
    expected: list[list[int]], speculative: Any, like_gpu: bool
) -> None:
    llm = tiny(max_num_seqs=4, speculative=speculative)
    llm = as_on_gpu(llm) if like_gpu else llm
    seen = {token for row in [*PROMPTS, *expected] for token in row}
    broken_token = min(set(range(VOCAB)) - seen)
    model: Any = llm.engine._launcher._built.target.model
    model.model.embed_tokens.weight[broken_token] = torch.nan
    found = llm.generate([*PROMPTS, [3, broken_token, 4]], GREEDY)
    assert_idle(llm)
    assert [answer.outputs[0].token_ids for answer in found[:-1]] == expected
    assert found[-1].outputs[0].finish_reason == "error" and not found[-1].outputs[0].token_ids
    assert found[-1].error == (
        "FloatingPointError: all logits after 3 tokens are NaN or -inf: none can be chosen"
    )
    assert llm.stats.num_nan_rows == 1 + like_gpu * (speculative is None)  # one more in flight


def test_a_broken_device_ends_the_engine(served: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.engine._launcher._built.runner, "run", broken)
    with pytest.raises(RuntimeError, match="of one request"):
        served.generate(PROMPTS, GREEDY)
