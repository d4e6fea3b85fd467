"""Sampling of batches: distributions, filters, penalties, seeds, logprobs, bad numbers."""

from __future__ import annotations

import itertools
import math
import sys
from typing import Any

import numpy as np
import pytest
import torch
from drafting import filtered_probs
from torch import Tensor

from anabranch.kernels.cpu import gumbel_argmax as on_cpu
from anabranch.kernels.cpu import mask_tokens as mask_on_cpu
from anabranch.kernels.triton import gumbel_argmax as in_triton
from anabranch.kernels.triton import mask_tokens as mask_in_triton
from anabranch.llm.grammar.token_rules import token_mask
from anabranch.llm.sampling.batch import HostSamples, SampleBatch, TokenMasks
from anabranch.llm.sampling.logits import (
    UNIT,
    _argmax_in_pieces,
    child_seed,
    draw,
    fresh_seed,
    keep_top_p,
    mask_tokens,
    noise_keys,
    top_k_bounds,
)
from anabranch.llm.sampling.logprobs import prompt_logprobs
from anabranch.llm.sampling.params import SamplingParams, SamplingRows
from anabranch.llm.sampling.sampler import Sampler, SampleStep
from anabranch.llm.sampling.token_logprobs import Logprob, top_entries

VOCAB = 12
FILTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "all": {"temperature": 1.4, "top_k": 6, "top_p": 0.85, "min_p": 0.05},
}


def sampler_of(*requests: SamplingParams, vocab: int = VOCAB, first_seed: int = 0) -> Sampler:
    sampler = Sampler(SamplingRows(len(requests), vocab), "cpu")
    for row, params in enumerate(requests):
        sampler.add(row, params, [1, 2], [], first_seed + row)
    return sampler


def batch_of(num_seqs: int, position: int = 0, **drafts: Any) -> SampleBatch:
    none = {"num_drafts": [0] * num_seqs}
    return SampleBatch(rows=range(num_seqs), num_outputs=[position] * num_seqs, **(none | drafts))


def sample(sampler: Sampler, logits: Tensor, batch: SampleBatch) -> HostSamples:
    return sampler.sample(logits, batch).to_host().wait()


def assert_distributed(tokens: Tensor, probs: Tensor) -> None:
    """Chi-square at a level of 1e-4, by Wilson and Hilferty's approximation."""
    counts = torch.bincount(tokens, minlength=len(probs)).double()
    assert not counts[probs == 0].any()
    expected = probs * len(tokens)
    rare = expected < 8
    counts, expected = (
        torch.cat([part[~rare], part[rare].sum(0, True)]) for part in (counts, expected)
    )
    statistic = ((counts - expected) ** 2 / expected.clamp(min=8)).sum().item()
    freedom = max(len(expected) - 1, 1)
    spread = 2 / (9 * freedom)
    assert statistic < freedom * (1 - spread + 3.72 * math.sqrt(spread)) ** 3


def expected_probs(logits: Tensor, params: SamplingParams) -> Tensor:
    """The filtered distribution of one row, written for reading."""
    scores = logits.double()
    if params.greedy:
        return torch.nn.functional.one_hot(scores.argmax(), len(scores)).double()
    probs = torch.softmax(scores / params.temperature, 0)
    probs[probs < params.min_p * probs.max()] = 0
    if params.top_k:
        probs[probs < probs.sort(descending=True).values[params.top_k - 1]] = 0
    probs /= probs.sum()
    kept = 0.0
    order = probs.argsort(descending=True).tolist()
    for place, token in enumerate(order):
        if kept >= params.top_p:
            probs[order[place:]] = 0
            break
        kept += probs[token].item()
    return probs / probs.sum()


@pytest.mark.parametrize("name", FILTERS)
def test_samples_are_distributed_as_the_filtered_softmax(name: str) -> None:
    params = SamplingParams(**FILTERS[name])
    sampler = sampler_of(*[params] * 1500)
    logits = torch.randn(VOCAB) * 1.5
    batches = [batch_of(1500, position) for position in range(8)]
    tokens = [sampler.sample(logits.expand(1500, -1), batch).tokens for batch in batches]
    assert_distributed(torch.cat(tokens).squeeze(1), expected_probs(logits, params))


@pytest.mark.parametrize(
    ("vocab", "dtype", "spread"),
    [
        (1, torch.float32, 8.0),
        (5, torch.float64, 8.0),
        (127, torch.float32, 60.0),
        (128, torch.bfloat16, 8.0),  # as many levels as it tells apart
        (1000, torch.float32, 8.0),
        (1000, torch.float32, 0.25),  # many levels in a coarse bin
    ],
)
def test_filters_equal_the_slow_ones(vocab: int, dtype: torch.dtype, spread: float) -> None:
    requests = [
        SamplingParams(temperature=temperature, top_k=min(top_k, vocab), top_p=top_p, min_p=min_p)
        for temperature, top_k, top_p, min_p in itertools.product(
            (0.5, 1.0), (0, 3, 40), (1.0, 0.9, 0.3, 1e-6), (0.0, 0.1)
        )
    ]
    # Distinct in every dtype, so that there are no ties to keep.
    levels = torch.arange(vocab).double() * (spread / vocab)
    logits = torch.stack([levels[torch.randperm(vocab)] for _ in requests]).to(dtype)
    sampler = sampler_of(*requests, vocab=vocab)
    probs = filtered_probs(sampler, logits, batch_of(len(requests)))
    for params, row, found in zip(requests, logits, probs, strict=True):
        expected = expected_probs(row, params)
        weighs = expected * UNIT > expected.max()
        assert torch.equal((found > 0) & weighs, weighs), params
        assert not found[expected == 0].any(), params
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-4)


def test_bounds_of_top_k() -> None:
    logs = torch.tensor([-1.0, 0.0, -3.0, -2.0]).expand(4, -1)
    found = top_k_bounds(logs, torch.tensor([1, 2, 4, 0]), 4)
    assert found.tolist() == [0.0, -1.0, -3.0, -math.inf]


def test_ties_are_kept_by_filters() -> None:
    logits = torch.tensor([[0.0, 5.0, 3.0, 3.0, 3.0, 0.0]]).expand(2, -1)
    sampler = sampler_of(SamplingParams(top_k=2), SamplingParams(top_p=0.8), vocab=6)
    probs = filtered_probs(sampler, logits, batch_of(2))
    assert ((probs > 0) == torch.tensor([False, True, True, True, True, False])).all()


def test_top_p_over_a_flat_and_a_steep_row() -> None:
    logs = torch.stack([torch.zeros(500), torch.arange(500) * -30.0, torch.arange(500) * -1.0])
    kept = keep_top_p(logs, torch.tensor([0.5, 0.99, 1.0], dtype=torch.float64)).isfinite()
    assert kept[0].all(), "ties are kept"
    assert kept[1].nonzero().tolist() == [[0]]
    assert kept[2].all(), "a neighbour's top_p takes nothing from a row that has none"


def test_draw_never_takes_what_has_no_weight() -> None:
    logs = torch.full((3, 300), -torch.inf)
    logs[0, 290], logs[1, 7] = 0.0, -80.0
    keys = torch.from_numpy(noise_keys(np.arange(1000), np.array([0])))
    for key in keys.split(3)[:-1]:
        assert draw(logs, key).tolist() == [290, 7, 0]


def test_noise_is_uniform_and_apart_for_seeds_positions_and_tokens() -> None:
    size = 64
    seeds, positions = np.arange(size).repeat(size), np.tile(np.arange(size), size)
    keys = noise_keys(seeds, positions)
    words = torch.from_numpy(np.stack([on_cpu.words(int(key), size) for key in keys]).astype(int))
    uniforms = words.double().view(size, size, size) * 2.0**-32  # [seed, position, token]
    assert_distributed((uniforms.flatten() * 100).long(), torch.full((100,), 0.01))
    assert_distributed((uniforms.flatten() * 2**20).long() % 100, torch.full((100,), 0.01))
    for dim in range(3):
        pairs = uniforms.narrow(dim, 1, size - 1), uniforms.narrow(dim, 0, size - 1)
        for place in (pairs[0] - pairs[1], pairs[0] + pairs[1]):
            assert abs(place.var().item() - 1 / 6) < 2e-3  # of independent uniforms


def test_noise_is_gumbels() -> None:
    noise = torch.cat([on_cpu.gumbels(key * 0x9E3779B97F4A7C15 % 2**63, 1000) for key in range(40)])
    assert noise.min() > -2.9 and noise.max() < 22.2
    uniforms = torch.exp(-torch.exp(-noise.double()))
    assert_distributed((uniforms * 100).long(), torch.full((100,), 0.01))
    assert abs(noise.mean().item() - 0.5772) < 4 * 1.2825 / len(noise) ** 0.5


def test_words_are_those_of_the_mixer() -> None:
    """In whole numbers, by hand."""
    for key in (0, -1, 0x0123456789ABCDEF):
        for token in (0, 1, 299):
            word = (token * 0x9E3779B1 + key) % 2**32
            word = (word ^ word >> 16) * 0x21F0AAAD % 2**32
            word = ((word ^ word >> 15) + (key >> 32)) * 0xD35A2D97 % 2**32
            word = min((word ^ word >> 15) | 1, 0xFFFFFF00)
            assert on_cpu.words(key, 300)[token] == word


def test_keys_are_splitmix64() -> None:
    def mix(word: int) -> int:
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
        return word ^ word >> 31

    step = 0x9E3779B97F4A7C15
    for seed, position in ((0, 0), (-1, 7), (2**63 - 1, 10**6)):
        bits = mix((mix((seed + step) % 2**64) + position * step) % 2**64)
        assert noise_keys(np.array([seed]), np.array([position])).item() % 2**64 == bits


@pytest.mark.parametrize("vocab", [1, 97, 2048, 2049, 5000])
def test_the_kernel_draws_what_the_cpu_draws(vocab: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    logs = torch.randn(6, vocab) * 3
    logs[1, : vocab // 2] = -torch.inf
    logs[2] = -torch.inf
    logs[3] = 0.0
    wide = torch.full((6, vocab + 3), torch.nan)  # rows may lie apart
    wide[:, :vocab] = logs
    keys = torch.from_numpy(noise_keys(np.arange(6), np.array([9])))
    found = in_triton.gumbel_argmax(wide.to(device)[:, :vocab], keys.to(device))
    assert found.tolist() == on_cpu.gumbel_argmax(logs, keys).tolist()


@pytest.mark.parametrize("num_left", [0, 1, 7, 2000, 4999, 5000])
def test_a_cpu_makes_noise_for_few_tokens_where_few_are_left(
    num_left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs, left = torch.full((5000,), -torch.inf), torch.randperm(5000)[:num_left]
    logs[left] = torch.randn(num_left)
    wanted = [int((logs + on_cpu.gumbels(key, 5000)).argmax()) for key in range(9)]
    sizes, words = list[int](), on_cpu.words
    monkeypatch.setattr(on_cpu, "words", lambda *given: counted(sizes, words(*given)))
    found = on_cpu.gumbel_argmax(logs.expand(9, -1), torch.arange(9))
    assert found.tolist() == wanted
    assert sizes == [num_left if 0 < num_left < 2500 else 5000] * 9


def counted(sizes: list[int], words: on_cpu.Words) -> on_cpu.Words:
    sizes.append(len(words))
    return words


@pytest.mark.parametrize("vocab", [1, 31, 32, 97, 4096, 5000])
@pytest.mark.parametrize(
    "ban", [mask_on_cpu.mask_tokens, mask_on_cpu.ban_in_numpy, mask_in_triton.mask_tokens]
)
def test_masks_ban_tokens_of_their_rows(ban: Any, vocab: int) -> None:
    on_gpu = ban is mask_in_triton.mask_tokens and torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    wide = torch.randn(5, vocab + 3, device=device)  # rows may lie apart
    scores = wide[:, :vocab]
    allowed = [set(range(0, vocab, 3)), set[int](), set(range(vocab))]
    words = torch.from_numpy(np.stack([token_mask(each, vocab) for each in allowed])).to(device)
    wanted, rows = scores.clone(), [4, 0, 2]
    for row, tokens in zip(rows, allowed, strict=True):
        banned = sorted(set(range(vocab)) - tokens)
        wanted[row, banned] = -torch.inf
    ban(scores, torch.tensor(rows, device=device), words)
    assert torch.equal(scores, wanted)


def test_a_cpu_bans_tokens_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, mask_in_triton.__name__, None)
    words = torch.from_numpy(token_mask({1}, 3)).unsqueeze(0)
    scores = mask_tokens(torch.zeros(2, 3), torch.tensor([1]), words)
    assert scores.tolist() == [[0, 0, 0], [-math.inf, 0, -math.inf]]


def test_rounding_of_the_logits_moves_only_near_ties() -> None:
    """A draw by the running sum over the vocabulary differs in over one percent of the rows."""
    logits = torch.randn(300, 20000) * 2
    sampler = sampler_of(*[SamplingParams()] * 300, vocab=20000)
    rounded = logits + 1e-4 * torch.randn_like(logits)
    first, second = (sampler.sample(each, batch_of(300)).tokens for each in (logits, rounded))
    assert (first != second).sum() <= 1


def test_child_and_fresh_seeds() -> None:
    children = [child_seed(seed, index) for seed in (0, 1, -5) for index in range(100)]
    assert len(set(children)) == 300
    assert child_seed(-5, 0) == -5
    assert all(-(2**63) <= seed < 2**63 for seed in children)
    assert fresh_seed() != fresh_seed()


def test_a_seed_reproduces_in_any_row_of_any_batch() -> None:
    params = SamplingParams(temperature=0.9, top_p=0.95, top_k=30)
    logits = torch.randn(20, 700) * 2
    alone = Sampler(SamplingRows(1, 700), "cpu")
    alone.add(0, params, [], [], 123)
    many = Sampler(SamplingRows(40, 700), "cpu")
    for row in range(40):
        many.add(row, SamplingParams(top_p=0.5, repetition_penalty=1.2), [1], [], row)
    many.remove(33)
    many.add(33, params, [], [], 123)
    for position, row_logits in enumerate(logits):
        one = SampleBatch(rows=[0], num_outputs=[position], num_drafts=[0])
        three = SampleBatch(rows=[7, 33, 2], num_outputs=[4, position, 9], num_drafts=[0] * 3)
        (token,) = sample(alone, row_logits.unsqueeze(0), one).tokens
        others = torch.randn(3, 700)
        others[1] = row_logits
        assert sample(many, others, three).tokens[1] == token


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_k": 1}])
def test_greedy_takes_the_first_maximum_on_every_path(options: dict[str, Any]) -> None:
    greedy = SamplingParams(**options)
    logits = torch.randn(6, VOCAB).bfloat16()
    logits[:, 3] = logits[:, 8] = 9.0
    logits[3:, 3] = -1.0
    expected = [[3]] * 3 + [[8]] * 3
    assert sample(sampler_of(*[greedy] * 6), logits, batch_of(6)).tokens == expected
    for other in ({}, {"top_p": 0.9}, {"presence_penalty": 1.0}, {"logit_bias": {0: 1.0}}):
        sampler = sampler_of(*[greedy] * 5, SamplingParams(**other))
        assert sample(sampler, logits, batch_of(6)).tokens[:5] == expected[:5]


def penalised(logits: Tensor, params: SamplingParams, prompt: list[int], out: list[int]) -> Tensor:
    scores = logits.double().clone()
    for token in range(len(scores)):
        scores[token] += params.logit_bias.get(token, 0.0)
        if token in prompt or token in out:
            factor = params.repetition_penalty
            scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
        scores[token] -= params.frequency_penalty * out.count(token)
        scores[token] -= params.presence_penalty * (token in out)
    return scores


PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.5},
    {"frequency_penalty": 0.4},
    {"presence_penalty": -0.7},
    {
        "repetition_penalty": 0.8,
        "frequency_penalty": -0.2,
        "presence_penalty": 1.1,
        "logit_bias": {2: 1.5, 5: -100},
    },
]


def test_penalties_equal_the_slow_ones_and_survive_preemption() -> None:
    requests = [SamplingParams(logprobs=VOCAB, **options) for options in PENALTIES]
    sampler = sampler_of(*requests)
    logits = torch.randn(len(requests), VOCAB) * 2
    outputs: list[list[int]] = [[] for _ in requests]
    rows = list(zip(logits, requests, strict=True))
    for position in range(12):
        if position == 6:
            for row, params in enumerate(requests):
                sampler.remove(row)
                sampler.add(row, params, [1, 2], outputs[row], row)
        keys = noise_keys(np.arange(len(requests)), np.array([position]))
        batch = batch_of(len(requests), position)
        step = SampleStep(sampler._rows, batch, sampler.device)
        changed = step.process(logits, sampler._counts).double()
        expected = [penalised(*each, [1, 2], outputs[row]) for row, each in enumerate(rows)]
        torch.testing.assert_close(changed, torch.stack(expected), atol=1e-5, rtol=1e-6)
        tokens = sample(sampler, logits, batch).tokens
        for row in range(len(requests)):
            noisy = expected[row] + on_cpu.gumbels(int(keys[row]), VOCAB)
            near, top = noisy.sort().values[-2:]
            assert top - near > 1e-5, "a tie tells nothing"
            assert tokens[row] == [int(noisy.argmax())]
            outputs[row] += tokens[row]


def test_min_tokens_bans_stops_until_then() -> None:
    params = SamplingParams(temperature=0, min_tokens=3, stop_token_ids=[4])
    sampler = Sampler(SamplingRows(3, VOCAB), "cpu")
    sampler.add(0, params, [], [], 0, [7])
    sampler.add(1, SamplingParams(min_tokens=3, ignore_eos=True, top_k=1), [], [], 0, [7])
    sampler.add(2, SamplingParams(min_tokens=3, logit_bias={4: 50.0, 7: 50.0}), [], [], 0, [7])
    logits = torch.zeros(VOCAB)
    logits[7], logits[4], logits[2] = 30.0, 20.0, 10.0
    found = [sample(sampler, logits.expand(3, -1), batch_of(3, at)).tokens for at in (0, 2, 3)]
    assert found == [[[2], [7], [4]], [[2], [7], [4]], [[7], [7], [7]]]


@pytest.mark.parametrize("options", [{"temperature": 0}, {}, {"logit_bias": {3: 50.0}}])
def test_masked_rows_take_what_their_masks_allow(options: dict[str, Any]) -> None:
    allowed = [{4}, {9}]
    words = np.stack([token_mask(each, VOCAB) for each in allowed])
    masks = TokenMasks(np.array([2, 0]), torch.from_numpy(words))
    logits = torch.zeros(3, VOCAB)
    logits[:, 3] = 40.0
    found = sample(sampler_of(*[SamplingParams(**options)] * 3), logits, batch_of(3, masks=masks))
    assert found.tokens == [[9], [3], [4]]


def test_a_new_row_leaves_the_counts_of_others_alone() -> None:
    sampler, params = (
        Sampler(SamplingRows(3, VOCAB), "cpu"),
        SamplingParams(temperature=0, frequency_penalty=1.0),
    )
    for row in (0, 2, 1):
        sampler.add(row, params, [], [3] * 9, 0)
    logits = torch.zeros(3, VOCAB)
    logits[:, 3], logits[:, 5] = 5.0, 1.0
    assert sample(sampler, logits, batch_of(3)).tokens == [[5]] * 3


def test_the_likeliest_token_has_rank_1() -> None:
    entries = top_entries(np.array([4, 2, 9]), np.array([-0.5, -1.5, -2.5]), 2)
    assert entries == {4: Logprob(-0.5, 1), 2: Logprob(-1.5, 2)}


def test_one_token_at_least() -> None:
    sampler = Sampler(SamplingRows(1, VOCAB), "cpu")
    sampler.add(0, SamplingParams(temperature=0, min_tokens=1), [], [], 0, [7])
    logits = torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 2] = 30.0, 10.0
    assert [sample(sampler, logits, batch_of(1, at)).tokens for at in (0, 1)] == [[[2]], [[7]]]


def test_logit_bias_shifts_the_distribution() -> None:
    bias = {3: 2.0, 4: -100.0}
    sampler = sampler_of(*[SamplingParams(logit_bias=bias)] * 3000)
    logits = torch.randn(VOCAB)
    tokens = sampler.sample(logits.expand(3000, -1), batch_of(3000)).tokens.squeeze(1)
    shifted = logits.double()
    shifted[3] += 2
    shifted[4] = -torch.inf
    assert_distributed(tokens, torch.softmax(shifted, 0))


@pytest.mark.parametrize("options", [*FILTERS.values(), {"temperature": 0}, *PENALTIES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bad_numbers_give_a_token_or_none_and_leave_other_rows_alone(
    options: dict[str, Any], dtype: torch.dtype
) -> None:
    good = torch.randn(VOCAB)
    rows = [good.clone() for _ in range(7)]
    rows[1][:] = torch.nan
    rows[2][:] = -torch.inf
    rows[3][:] = -torch.inf
    rows[3][6] = 0.0
    rows[4][9] = torch.inf
    rows[6][[0, 5]] = torch.nan
    logits = torch.stack(rows).to(dtype)
    sampler = sampler_of(*[SamplingParams(logprobs=2, **options)] * 7)
    found = sample(sampler, logits, batch_of(7))
    tokens = found.tokens
    assert tokens[1] == tokens[2] == []
    assert tokens[3] == [6] and tokens[4] == [9]
    assert found.num_nan_rows == 2
    clean = sampler_of(*[SamplingParams(**options)] * 7)
    banned = good.index_fill(0, torch.tensor([0, 5]), -torch.inf)
    rows = [good] * 6 + [banned]
    expected = sample(clean, torch.stack(rows).to(dtype), batch_of(7)).tokens
    assert [tokens[row] for row in (0, 5, 6)] == [expected[row] for row in (0, 5, 6)]
    assert found.logprobs is not None
    chosen = torch.tensor(found.logprobs[6].chosen[0])
    exact = banned.to(dtype).float().log_softmax(0)[tokens[6][0]]
    torch.testing.assert_close(chosen, exact)
    assert not any(np.isnan(each.top).any() for each in found.logprobs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_greedy_token_beside_nan_does_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    logits = torch.arange(float(VOCAB)).repeat(2, 1).to(dtype)
    logits[0, 2] = torch.nan
    for beside in (SamplingParams(temperature=0), SamplingParams(seed=1)):
        found = sample(sampler_of(SamplingParams(temperature=0), beside), logits, batch_of(2))
        assert found.tokens[0] == [VOCAB - 1] and found.num_nan_rows == 1
        assert found.saturated == 0  # of caches that are not quantised


def test_logits_are_left_as_they_are() -> None:
    logits = torch.randn(4, VOCAB)
    before = logits.clone()
    sampler_of(*[SamplingParams(**options) for options in PENALTIES]).sample(logits, batch_of(4))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_of_the_raw_distribution(dtype: torch.dtype) -> None:
    logits = (torch.randn(3, 50) * 4).to(dtype)
    requests = [
        SamplingParams(logprobs=4, temperature=0.3),
        SamplingParams(top_k=3, logit_bias={7: 30.0}),
        SamplingParams(logprobs=0, temperature=0),
    ]
    found = sample(sampler_of(*requests, vocab=50), logits, batch_of(3))
    assert found.logprobs is not None
    expected = torch.log_softmax(logits.double(), 1).numpy()
    for row, (token,) in enumerate(found.tokens):
        logprobs = found.logprobs[row]
        assert logprobs.top_ids.shape == (1, 4)
        np.testing.assert_allclose(logprobs.chosen, expected[row, [token]], atol=1e-5)
        assert logprobs.ranks == [1 + (expected[row] > expected[row, token]).sum()]
        np.testing.assert_allclose(logprobs.top[0], -np.sort(-expected[row])[:4], atol=1e-5)
        np.testing.assert_allclose(logprobs.top[0], expected[row, logprobs.top_ids[0]], atol=1e-5)


@pytest.mark.parametrize("num_tokens", [0, 1, 300])
def test_prompt_logprobs(num_tokens: int) -> None:
    logits, targets = torch.randn(num_tokens, 30), torch.randint(30, (num_tokens,))
    found = prompt_logprobs(logits, targets, 3)
    expected = torch.log_softmax(logits.double(), 1)
    chosen = expected.gather(1, targets.unsqueeze(1))
    torch.testing.assert_close(found.chosen.double(), chosen.squeeze(1), atol=1e-5, rtol=0)
    torch.testing.assert_close(found.top.double(), expected.topk(3).values, atol=1e-5, rtol=0)
    assert torch.equal(found.ranks, (expected > chosen).sum(1) + 1)
    assert prompt_logprobs(logits, targets, 0).top.shape == (num_tokens, 0)
    assert prompt_logprobs(logits, targets, 30).top.shape == (num_tokens, 30)
    for wrong in (-1, 31):
        with pytest.raises(ValueError, match=f"num_top {wrong} is not from 0 to the vocabulary 30"):
            prompt_logprobs(logits, targets, wrong)


def test_outputs_stay_on_the_device_too() -> None:
    output = sampler_of(*[SamplingParams()] * 3).sample(torch.randn(3, VOCAB), batch_of(3))
    assert output.tokens.shape == (3, 1) and output.tokens.dtype == torch.int64
    assert output.last_tokens.tolist() == output.tokens[:, 0].tolist()
    assert output.num_emitted.tolist() == [1] * 3 and output.num_accepted.tolist() == [0] * 3
    assert output.logprobs is None and output.to_host().wait().logprobs is None


def test_refusals() -> None:
    sampler = sampler_of(SamplingParams(), SamplingParams())
    sampler.remove(1)
    with pytest.raises(ValueError, match=r"rows \[1\] hold no request"):
        sampler.sample(torch.zeros(2, VOCAB), batch_of(2))
    with pytest.raises(ValueError, match=r"logits are \[2, 12\].* \[1, 12\]"):
        sampler.sample(torch.zeros(2, VOCAB), batch_of(1))
    with pytest.raises(ValueError, match="row 1 holds no request"):
        sampler.remove(1)
    with pytest.raises(ValueError, match="row 0 holds a request"):
        sampler.add(0, SamplingParams(), [], [], 0)
    with pytest.raises(ValueError, match="row 2 is not one of 2"):
        sampler.add(2, SamplingParams(), [], [], 0)
    for options in ({"logit_bias": {12: 1.0}}, {"stop_token_ids": [12]}, {"logprobs": 13}):
        with pytest.raises(ValueError, match=r"vocabulary.* 12"):
            sampler.add(1, SamplingParams(**options), [], [], 0)
    with pytest.raises(ValueError, match=r"rows \[0, 0\] are not distinct"):
        SampleBatch(rows=[0, 0], num_outputs=[0, 0], num_drafts=[0, 0])
    with pytest.raises(ValueError, match=r"lengths \(2, 1, 2\)"):
        SampleBatch(rows=[0, 1], num_outputs=[0], num_drafts=[0, 0])
    with pytest.raises(ValueError, match=r"num_drafts \[1\] exceed 0 drafts"):
        SampleBatch(rows=[0], num_outputs=[0], num_drafts=[1])
    with pytest.raises(ValueError, match=r"num_drafts \[-1\] exceed"):
        SampleBatch(rows=[0], num_outputs=[0], num_drafts=[-1])
    drafts, one = torch.zeros(2, 3, dtype=torch.int64), {"rows": [0], "num_outputs": [0]}
    with pytest.raises(ValueError, match=r"draft_tokens \[2, 3\] do not match 1 sequences"):
        SampleBatch(**one, num_drafts=[3], draft_tokens=drafts)
    SampleBatch(**one, num_drafts=[3], draft_tokens=drafts[:1])
    with pytest.raises(ValueError, match=r"num_drafts \[4\] exceed 3 drafts"):
        SampleBatch(**one, num_drafts=[4], draft_tokens=drafts[:1])
    with pytest.raises(ValueError, match=r"parents of \[1\] drafts do not match \[2\]"):
        SampleBatch(**one, num_drafts=[2], draft_tokens=drafts[:1], parents=[[-1]])
    with pytest.raises(ValueError, match="row -1 is not one of 2"):
        sampler.add(-1, SamplingParams(), [], [], 0)
    for options in ({"logit_bias": {11: 1.0}}, {"stop_token_ids": [0, 11]}, {"logprobs": 12}):
        sampler.add(1, SamplingParams(**options), [], [], 0)
        sampler.remove(1)
    with pytest.raises(ValueError, match="a stop token is outside the vocabulary 12"):
        sampler.add(1, SamplingParams(), [], [], 0, [-1])


@pytest.mark.gpu
@pytest.mark.parametrize("drafts", ["none", "given"])
@pytest.mark.parametrize(
    "options", [{"temperature": 0}, *FILTERS.values(), *PENALTIES, {"logprobs": 3}]
)
def test_no_step_waits_for_the_gpu(drafts: str, options: dict[str, Any]) -> None:
    device, num_seqs, vocab = torch.device("cuda"), 5, 1000
    sampler, twin = (Sampler(SamplingRows(num_seqs, vocab), place) for place in (device, "cpu"))
    num_drafts = [0] * num_seqs if drafts == "none" else [0, 2, 3, 1, 3]
    logits = torch.randn(sum(num_drafts) + num_seqs, vocab, device=device) * 3
    given: dict[str, Any] = {}
    if drafts != "none":
        given["draft_tokens"] = torch.randint(vocab, (num_seqs, 3), device=device)
    pending = []
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for row in range(num_seqs):
            sampler.add(row, SamplingParams(**options), [1, 2], [3], row, [0])
        for step in range(3):
            batch = batch_of(num_seqs, step, num_drafts=num_drafts, **given)
            pending.append(sampler.sample(logits, batch).to_host())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for row in range(num_seqs):
        twin.add(row, SamplingParams(**options), [1, 2], [3], row, [0])
    given = {name: tensor.cpu() for name, tensor in given.items()}
    for step, found in enumerate(pending):
        batch = batch_of(num_seqs, step, num_drafts=num_drafts, **given)
        assert found.wait().tokens == sample(twin, logits.cpu(), batch).tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_argmax_in_pieces_is_the_first_argmax(dtype: torch.dtype) -> None:
    scores = torch.randn(5, 64 * 37).to(dtype)
    scores[0, [100, 2000]] = scores[1, [3, 70]] = 9.0
    scores[2] = -torch.inf
    scores[3] = 0.5
    assert _argmax_in_pieces(scores).equal(scores.argmax(1))
