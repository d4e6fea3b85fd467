"""Speculation: what is proposed, that no distribution changes, what is counted, when it stops."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anabranch.llm.engine.stats import SpeculativeStats
from anabranch.llm.runner.stage_clock import StageClock
from anabranch.llm.speculative.adaptive import (
    FRESH,
    RETRY_STEPS,
    TRIAL_STEPS,
    AdaptiveDrafts,
    Times,
)
from anabranch.llm.speculative.ngram import NgramIndex

pytest.importorskip("transformers")

from test_sampler import assert_distributed
from tiny_models import (
    GREEDY,
    as_on_gpu,
    assert_idle,
    blurred_source,
    eager,
    one_by_one,
    outputs,
    random_prompts,
    source,
    tiny,
)

from anabranch.llm.engine import engine as engine_module
from anabranch.llm.engine.llm import LLM
from anabranch.llm.sampling.params import SamplingParams
from anabranch.llm.sequences.sequence import Origin

NGRAM = {"method": "ngram", "min_ngram": 1, "adaptive": False}
SELF = {"method": "draft", "model": source(), "adaptive": False}
BLURRED = {"method": "draft", "model": blurred_source(), "adaptive": False}
PROMPTS = random_prompts()


# n-grams


def looked_up(tokens: list[int], low: int, high: int, num_drafts: int) -> list[int]:
    """The latest earlier place of the longest n-gram that ends the tokens, by search."""
    for size in range(min(high, len(tokens)), low - 1, -1):
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == tokens[-size:]:
                grown = list(tokens)
                for _ in range(num_drafts):
                    grown.append(grown[start + size + len(grown) - len(tokens)])
                return grown[len(tokens) :]
    return []


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=30),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(1, 6),
    st.data(),
)
def test_ngrams_are_the_longest_and_latest(
    tokens: list[int], low: int, more: int, num_drafts: int, data: st.DataObject
) -> None:
    index = NgramIndex(low, low + more)
    seen = 1
    while seen < len(tokens):  # the sequence grows by some tokens a step
        found = index.propose(tokens[:seen], num_drafts)
        assert found == looked_up(tokens[:seen], low, low + more, num_drafts)
        seen += data.draw(st.integers(1, 5))
    assert index.propose(tokens, num_drafts) == looked_up(tokens, low, low + more, num_drafts)


def test_nothing_seen_before_is_no_draft() -> None:
    assert NgramIndex(2, 4).propose([1, 2, 3, 4], 4) == []
    assert NgramIndex(2, 4).propose([7], 4) == []
    assert NgramIndex(1, 4).propose([7, 7], 3) == [7, 7, 7], "a loop goes on"


# Distributions


VOCAB, LENGTH = 4, 3
REQUESTS, SAMPLES = 10, 200
SHAPE = {"vocab_size": VOCAB, "eos_token_id": None, "initializer_range": 0.12}
SMALL = source(**SHAPE)
OTHER = source(**SHAPE, hidden_size=32, num_hidden_layers=1)
START = [0, 3, 1, 2, 0, 1]
METHODS: dict[str, Any] = {
    "plain": None,
    "n-gram": NGRAM,
    "n-gram, expanded": NGRAM | {"scorer": "batch-expansion", "num_drafts": 2},
    "draft": {"method": "draft", "model": OTHER, "adaptive": False},
    "draft, expanded": {
        "method": "draft",
        "model": OTHER,
        "adaptive": False,
        "scorer": "batch-expansion",
    },
}


def exact_probs(temperature: float, banned: int | None) -> torch.Tensor:
    """Of every continuation of LENGTH tokens, [VOCAB ** LENGTH]."""
    grid = list(itertools.product(range(VOCAB), repeat=LENGTH))
    ids = torch.tensor([[*START, *tokens] for tokens in grid])
    with torch.inference_mode():
        logits = eager(SMALL)(ids, use_cache=False).logits[:, len(START) - 1 : -1].double()
    if banned is not None:
        logits = logits.index_fill(2, torch.tensor(banned), -torch.inf)
    logprobs = (logits / temperature).log_softmax(2)
    places = ids[:, len(START) :].unsqueeze(2)
    return logprobs.gather(2, places).squeeze(2).sum(1).exp()


def sampled_cells(llm: LLM, **options: Any) -> torch.Tensor:
    """Continuations by the engine, numbered as in `exact_probs`."""
    params = [
        SamplingParams(n=SAMPLES, max_tokens=LENGTH + 1, seed=seed, **options)
        for seed in range(REQUESTS)
    ]
    found = llm.generate([START] * REQUESTS, params)
    tokens = [output.token_ids[:LENGTH] for each in found for output in each.outputs]
    return (torch.tensor(tokens) * torch.tensor([VOCAB**2, VOCAB, 1])).sum(1)


@pytest.mark.parametrize(
    ("name", "like_gpu"),
    [
        ("plain", True),
        ("n-gram", False),
        ("n-gram", True),
        ("n-gram, expanded", True),
        ("draft", False),
        ("draft", True),
        ("draft, expanded", False),
    ],
)
def test_sampled_text_is_distributed_as_the_models_own(name: str, like_gpu: bool) -> None:
    method = METHODS[name]
    llm = LLM(SMALL, device="cpu", max_num_seqs=256, speculative=method)
    if like_gpu:
        as_on_gpu(llm)
    assert_distributed(sampled_cells(llm, temperature=0.9), exact_probs(0.9, None))
    stats = llm.stats.speculative
    if method:
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert_idle(llm)


@pytest.mark.parametrize("method", ["n-gram", "draft"])
def test_a_biased_target_is_not_biased_by_its_drafts(method: str) -> None:
    llm = LLM(SMALL, device="cpu", max_num_seqs=256, speculative=METHODS[method])
    assert_distributed(sampled_cells(llm, logit_bias={3: -100.0}), exact_probs(1.0, 3))


# Counts


@pytest.mark.parametrize("like_gpu", [False, True], ids=["in turn", "in flight"])
def test_a_draft_model_that_is_the_target_is_always_right(like_gpu: bool) -> None:
    llm = tiny(speculative=SELF)
    if like_gpu:
        as_on_gpu(llm)
    assert outputs(llm, PROMPTS) == one_by_one(tiny(), PROMPTS)
    stats = llm.stats.speculative
    assert stats.acceptance_rate == 1.0
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 0
    assert stats.acceptance_by_position == [1.0] * 4
    # 23 tokens behind the first: 4 verifications of 4 drafts, and one of 2
    assert stats.num_drafts == 5 * len(PROMPTS)
    assert stats.system_efficiency == pytest.approx(23 / 25)
    assert stats.acceptance_length == pytest.approx(23 / 5)


@pytest.mark.parametrize("speculative", [NGRAM, BLURRED], ids=["n-gram", "draft"])
def test_counts_agree_with_each_other_and_with_outputs(speculative: Any) -> None:
    llm = tiny(speculative=speculative)
    found = [answer.outputs[0] for answer in llm.generate(PROMPTS, GREEDY)]
    stats = llm.stats.speculative
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert sum(stats.drafted_at) == stats.num_draft_tokens
    assert sum(stats.accepted_at) == stats.num_accepted_tokens
    assert stats.accepted_at == sorted(stats.accepted_at, reverse=True)
    assert all(a <= d for a, d in zip(stats.accepted_at, stats.drafted_at, strict=True))
    assert stats.num_emitted_tokens == stats.num_accepted_tokens + stats.num_drafts
    assert stats.num_max_tokens == 5 * stats.num_drafts
    origins = [origin for output in found for origin in output.origins]
    assert origins.count(Origin.ACCEPTED) == stats.num_accepted_tokens
    emitted = [len(list(run)) for output in found for _, run in itertools.groupby(output.steps)]
    assert sum(emitted) == llm.stats.num_output_tokens == 24 * len(PROMPTS)
    assert max(emitted) <= 5
    assert set(llm.stats.stage_ms) >= {"scoring", "verification"}
    assert "proposal" in llm.stats.stage_ms


def test_rates_of_nothing_are_zero() -> None:
    stats = SpeculativeStats()
    assert stats.acceptance_rate == stats.system_efficiency == stats.acceptance_length == 0
    stats.count(2, 1, 4)
    assert stats.drafted_at == [1, 1, 0, 0] and stats.accepted_at == [1, 0, 0, 0]
    assert stats.acceptance_by_position == [1.0, 0.0, 0.0, 0.0]


# Numbers of drafts that change from step to step


def switch(llm: LLM, numbers: Iterator[int]) -> None:
    """Let these numbers of drafts be chosen, whatever pays."""
    llm.engine.adaptive = Chosen(numbers)  # type: ignore[assignment]


class Chosen:
    def __init__(self, numbers: Iterator[int]) -> None:
        self._numbers = numbers

    def choose(self, batch: int, **_: Any) -> int:
        return next(self._numbers)

    def observe(self, *_: Any, **__: Any) -> None: ...

    def count(self, *_: Any) -> None: ...


@pytest.mark.parametrize("like_gpu", [False, True], ids=["in turn", "in flight"])
@pytest.mark.parametrize(
    "numbers", [[4, 0], [0, 0, 2, 0, 1, 4], [0] * 40 + [4, 0, 0]], ids=["turns", "mixed", "late"]
)
@pytest.mark.parametrize("speculative", [NGRAM, SELF], ids=["n-gram", "draft"])
def test_tokens_do_not_depend_on_when_drafts_are_made(
    numbers: list[int], speculative: Any, like_gpu: bool
) -> None:
    params = replace(GREEDY, max_tokens=60)
    prompts = PROMPTS[3:6]
    expected = one_by_one(tiny(), prompts, params)
    # a step holds fewer tokens than there are to catch up with
    llm = tiny(speculative=speculative, max_num_batched_tokens=6, max_num_seqs=3)
    if like_gpu:
        as_on_gpu(llm)
    switch(llm, itertools.cycle(numbers))
    assert outputs(llm, prompts, params) == expected
    stats = llm.stats.speculative
    if speculative is SELF:
        assert stats.num_accepted_tokens == stats.num_draft_tokens > 0


# Prefixes that the draft model has not computed


@pytest.mark.parametrize("like_gpu", [False, True], ids=["in turn", "in flight"])
@pytest.mark.parametrize("speculate", [None, False], ids=["while off", "opted out"])
def test_an_answer_without_drafts_is_found_and_drafted_for(
    speculate: bool | None, like_gpu: bool
) -> None:
    """The draft model computes what it lacks of the pages that were found: it is right again."""
    llm = tiny(speculative=SELF)
    if like_gpu:
        as_on_gpu(llm)
    params = replace(GREEDY, max_tokens=112)
    switch(llm, itertools.repeat(0))
    (first,) = outputs(llm, [PROMPTS[3]], replace(params, speculate=speculate))
    follow_up = PROMPTS[3] + first
    switch(llm, itertools.repeat(4))
    (found,) = llm.generate([follow_up], GREEDY)
    computed = len(follow_up) - 1  # the last token has been emitted, not computed
    assert found.num_cached_tokens == computed // 16 * 16 >= 112
    stats = llm.stats.speculative
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 0
    assert outputs(llm, [follow_up, follow_up]) == [found.outputs[0].token_ids] * 2
    assert stats.num_accepted_tokens == stats.num_draft_tokens
    assert [found.outputs[0].token_ids] == one_by_one(tiny(), [follow_up])
    assert_idle(llm)


@pytest.mark.parametrize("options", [{}, {"tree_width": 2}], ids=["chain", "tree"])
def test_steps_of_a_token_a_sequence(options: dict[str, Any]) -> None:
    """The fewest tokens that a step may have; the draft model is behind by one of each."""
    llm = tiny(speculative=SELF | options, max_num_batched_tokens=4, max_num_seqs=4)
    assert outputs(llm, PROMPTS[:4]) == outputs(tiny(), PROMPTS[:4])
    assert llm.stats.speculative.num_draft_tokens > 0


def test_pages_are_computed_by_the_draft_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny(speculative=SELF)
    prompt = PROMPTS[5]
    outputs(llm, [prompt], replace(GREEDY, speculate=False))
    assert len(PROMPTS[5]) // 16 == 2
    chain = llm.engine._launcher._built.draft
    assert chain is not None
    run, parts = chain.runner.run, list[Any]()

    def counted_run(step: Any) -> Any:
        parts.extend((part.start, part.num_tokens) for part in step)
        return run(step)

    monkeypatch.setattr(chain.runner, "run", counted_run)
    outputs(llm, [prompt])
    assert parts[0] == (0, len(prompt)), "none of the pages that were found had its keys"
    parts.clear()
    outputs(llm, [prompt])
    start = len(prompt) // 16 * 16
    assert parts[0] == (start, len(prompt) - start)


# The controller


def drive(adaptive: AdaptiveDrafts, steps: int, *, ms: dict[int, float], accepted: float) -> int:
    """Run steps that take `ms` by number of drafts; the number chosen most of the last ones."""
    chosen: list[int] = []
    credit = 0.0
    for _ in range(steps):
        number = adaptive.choose(1)
        chosen.append(number)
        if number:
            credit += accepted * number
            taken = min(int(credit), number)
            credit -= taken
            adaptive.count(number, taken, number)
        adaptive.observe(1, number, ms[number])
    last = chosen[-RETRY_STEPS:]
    return max(set(last), key=last.count)


FLAT = {0: 1.0, 1: 1.1, 2: 1.15, 4: 1.25}
STEEP = {0: 1.0, 1: 1.9, 2: 2.8, 4: 5.0}


def test_drafts_stop_when_never_accepted_and_come_back() -> None:
    adaptive = AdaptiveDrafts(4)
    assert drive(adaptive, 300, ms=FLAT, accepted=0.0) == 0
    assert adaptive.reason.startswith("speculation off") and "1.25 times" in adaptive.reason
    assert drive(adaptive, 3000, ms=FLAT, accepted=1.0) == 4
    assert adaptive.reason.startswith("4 drafts a step")


def test_drafts_stop_when_they_are_slow_and_come_back() -> None:
    adaptive = AdaptiveDrafts(4)
    assert drive(adaptive, 300, ms=STEEP, accepted=0.5) == 0
    assert "speculation off" in adaptive.reason and "5.00 times" in adaptive.reason
    assert drive(adaptive, 6000, ms=FLAT, accepted=1.0) == 4


def test_a_few_drafts_may_be_best() -> None:
    adaptive = AdaptiveDrafts(4)
    for _ in range(60):
        adaptive.count(4, 1, 4)  # the first is right, the second never
    assert drive(adaptive, 300, ms={0: 1, 1: 1.1, 2: 1.6, 4: 2.5}, accepted=0) != 4


def test_batch_sizes_are_judged_apart() -> None:
    adaptive = AdaptiveDrafts(2)
    for _ in range(30):
        adaptive.count(2, 2, 2)
    for batch, slow in ((1, 1.1), (64, 9.0)):
        for number in adaptive.choices:
            for _ in range(1 + FRESH):
                adaptive.observe(batch, number, slow if number else 1.0)
    assert adaptive.choose(1) == 2
    assert adaptive.choose(64) == 0
    assert "127" in adaptive.reason


def test_all_and_none_are_tried_first_and_the_others_later() -> None:
    adaptive = AdaptiveDrafts(4)
    assert adaptive.choices == [0, 1, 2, 4]
    tried: list[int] = []
    for _ in range(6 * RETRY_STEPS):
        tried.append(adaptive.choose(1))
        adaptive.observe(1, tried[-1], 1.0)
    first = 1 + FRESH
    assert tried[: 2 * first] == [4] * first + [0] * first
    assert set(tried) == {0, 1, 2, 4}
    assert [len(list(run)) for number, run in itertools.groupby(tried) if number in (1, 2)] == [
        TRIAL_STEPS
    ] * 4


def test_one_slow_step_changes_nothing() -> None:
    adaptive = AdaptiveDrafts(4)
    for ms in (1.2, 90.0, 1.2):  # a verification was held up
        assert adaptive.choose(1) == 4
        adaptive.observe(1, 4, ms)
    for _ in range(1 + FRESH):
        assert adaptive.choose(1) == 0
        adaptive.observe(1, 0, 1.0)
    assert adaptive.choose(1) == 4


def test_the_first_step_after_a_change_says_nothing() -> None:
    """It catches up, or has nothing to overlap with."""
    adaptive, before = AdaptiveDrafts(4), -1
    for _ in range(6 * RETRY_STEPS):
        number = adaptive.choose(1)
        adaptive.count(number, min(number, 1), number)
        adaptive.observe(1, number, FLAT[number] if number == before else 5.0)
        before = number
    for number, ms in FLAT.items():
        tokens = adaptive.expected_tokens(number)
        assert adaptive.gain(1, number) == pytest.approx(1e3 * tokens / ms)


def test_off_means_all() -> None:
    fixed = AdaptiveDrafts(4, enabled=False)
    assert drive(fixed, 100, ms=STEEP, accepted=0.0) == 4


def test_asking_in_vain_counts() -> None:
    adaptive = AdaptiveDrafts(4)
    for _ in range(60):
        adaptive.count(4, 0, 4)  # drafted or not: nothing came of it
    assert adaptive.expected_tokens(4) < 1.01


def test_drafts_that_an_end_left_no_room_for_are_not_rejected() -> None:
    adaptive = AdaptiveDrafts(4)
    for room, accepted in ((0, 0), (1, 1), (2, 2), (3, 3)):
        for _ in range(40):
            adaptive.count(4, accepted, room)
    assert adaptive.expected_tokens(3) > 3.99
    untried = AdaptiveDrafts(4).expected_tokens(1) - 1
    assert adaptive.expected_tokens(4) == pytest.approx(4 + untried, abs=0.02)
    assert drive(adaptive, 100, ms={0: 1.0, 1: 1.05, 2: 1.05, 4: 1.05}, accepted=0.0) == 0


def test_steps_with_and_without_drafts_count_alike() -> None:
    """A third of the steps that may have drafts get some: that third is not an exception."""
    times = Times()
    for ms in (1.0, 1.0, 4.0) * 3:
        times.add(ms)
    assert times.value == pytest.approx(2.0)
    times.add(90.0)  # held up
    assert times.value == pytest.approx((1.0 * 5 + 4.0 * 3) / 8)


COSTS = {
    "catch-up": 8.0,
    "model": 1.0,
    "scoring": 9.0,
    "proposal": 0.0,
    "sampling": 0.0,
    "verification": 0.0,
}


class Clock:
    """A clock that runs by what the stages of a step cost, and by nothing else."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, costs: dict[str, float]) -> None:
        self.now = 0.0
        self.costs = dict(costs)

        def read(clock: StageClock) -> dict[str, float]:
            times = {name: self.costs[name] for name, *_ in clock._marks}
            self.now += sum(times.values()) / 1e3
            return times

        monkeypatch.setattr(StageClock, "read", read)
        monkeypatch.setattr(engine_module.time, "perf_counter", lambda: self.now)


@pytest.mark.parametrize("like_gpu", [False, True], ids=["in turn", "in flight"])
@pytest.mark.parametrize("speculative", [NGRAM, SELF], ids=["n-gram", "draft"])
def test_an_engine_gives_drafts_up_and_tries_again(
    speculative: Any, like_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock(monkeypatch, COSTS)
    llm = tiny(speculative=speculative | {"adaptive": True})
    if like_gpu:
        as_on_gpu(llm)
    asked: list[int] = []
    prepare = llm.engine._proposer.prepare  # type: ignore[union-attr]

    def counted_prepare(seqs: Any, num_drafts: int) -> None:
        asked.append(num_drafts)
        prepare(seqs, num_drafts)

    monkeypatch.setattr(llm.engine._proposer, "prepare", counted_prepare)
    params = replace(GREEDY, max_tokens=200)
    assert outputs(llm, [PROMPTS[4]], params) == one_by_one(tiny(), [PROMPTS[4]], params)
    assert llm.engine.adaptive.reason.startswith("speculation off")
    assert llm.stats.speculative.num_drafts > FRESH
    first = 1 + FRESH
    assert asked[:first] == [4] * first
    assert TRIAL_STEPS <= len(asked) - first <= 20, "now and then"


@pytest.mark.parametrize("like_gpu", [False, True], ids=["in turn", "in flight"])
def test_looking_up_in_vain_is_given_up(like_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is ever found, but every step that looks waits for the one before it."""
    clock = Clock(monkeypatch, COSTS)
    llm = tiny(speculative=NGRAM | {"adaptive": True})
    if like_gpu:
        as_on_gpu(llm)
    looks = 0

    def propose(*_: Any) -> list[int]:
        nonlocal looks
        looks += 1
        clock.now += 0.2 / 1e3
        return []

    monkeypatch.setattr(NgramIndex, "propose", propose)
    outputs(llm, [PROMPTS[4]], replace(GREEDY, max_tokens=200))
    assert llm.stats.speculative.num_drafts == 0
    assert llm.engine.adaptive.reason.startswith("speculation off")
    assert "1.20 times" in llm.engine.adaptive.reason
    assert FRESH < looks < 20, "then and now"


@pytest.mark.parametrize("like_gpu", [False, True], ids=["in turn", "in flight"])
def test_catching_up_is_bounded_and_no_reason_against_drafts(
    like_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts are slow at first; when they are not any more, the way back is not their cost."""
    clock = Clock(monkeypatch, COSTS)
    llm = tiny(speculative=SELF | {"adaptive": True})
    if like_gpu:
        as_on_gpu(llm)
    adaptive, behind = llm.engine.adaptive, list[int]()
    chain = llm.engine._launcher._built.draft
    assert chain is not None
    run = chain.runner.run

    def counted_run(step: Any) -> Any:
        behind.extend(part.num_tokens for part in step if part.start >= part.seq.prompt_len)
        return run(step)

    monkeypatch.setattr(chain.runner, "run", counted_run)
    for _ in llm.stream(PROMPTS[4], replace(GREEDY, max_tokens=230)):
        if adaptive.reason.startswith("speculation off"):
            clock.costs["scoring"] = 1.1
    assert "a step" in adaptive.reason and "off" not in adaptive.reason
    assert behind and max(behind) <= RETRY_STEPS + FRESH + 3, "with the first steps without"
    assert llm.stats.stage_ms["catch-up"] >= COSTS["catch-up"] * len(behind)


@pytest.mark.parametrize("like_gpu", [False, True], ids=["in turn", "in flight"])
def test_drafts_are_given_up_while_prompts_arrive(
    like_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step runs a piece of some prompt, and no draft is ever right."""
    Clock(monkeypatch, COSTS)
    other = source(hidden_size=32, num_hidden_layers=1)
    llm = tiny(
        speculative={"method": "draft", "model": other},
        max_num_seqs=4,
        max_num_batched_tokens=24,
        prefix_caching=False,
    )
    if like_gpu:
        as_on_gpu(llm)
    engine, long = llm.engine, replace(GREEDY, max_tokens=100)
    prompts = random_prompts(9, [70] * 40)
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, long if number < 2 else replace(long, max_tokens=1))
    mixed = 0
    for _ in range(90):
        engine.step()
        mixed += bool(engine.scheduler.waiting)
    assert mixed == 90
    stats = llm.stats.speculative
    assert 0 < stats.num_draft_tokens <= 80, "those of the first steps, and of a trial"
    assert engine.adaptive.reason.startswith("speculation off")
    assert "beside prompts" in engine.adaptive.reason
    for number in range(len(prompts)):
        engine.abort(str(number))


def test_noise_in_the_times_makes_no_draft_free() -> None:
    """Steps beside prompts take any time; drafts that are never right are given up for good."""
    adaptive, draws = AdaptiveDrafts(4), torch.Generator().manual_seed(0)
    asked: list[int] = []
    for ms in (1 + 9 * torch.rand(600, generator=draws)).tolist():
        asked.append(adaptive.choose(3, with_prompts=True))
        adaptive.count(asked[-1], 0, asked[-1])
        adaptive.observe(3, asked[-1], ms, with_prompts=True)
    late = asked[100:]
    assert sum(number > 0 for number in late) <= TRIAL_STEPS * (1 + len(late) // RETRY_STEPS)


def test_situations_in_turns_are_all_measured() -> None:
    """Steps with and without prompts alternate, and want different numbers of drafts."""
    adaptive = AdaptiveDrafts(4)
    chosen: dict[bool, list[int]] = {False: [], True: []}
    for step in range(400):
        with_prompts = step % 2 == 1
        number = adaptive.choose(1, with_prompts=with_prompts)
        adaptive.count(number, min(number, 2), number)
        ms = 1.0 + 2.0 * number if with_prompts else FLAT[number]
        adaptive.observe(1, number, ms, with_prompts=with_prompts)
        chosen[with_prompts].append(number)
    assert max(set(chosen[False]), key=chosen[False].count) == 2
    assert max(set(chosen[True]), key=chosen[True].count) == 0
