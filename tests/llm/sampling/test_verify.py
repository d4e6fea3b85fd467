"""Verification of drafts: nothing changes what is emitted but how fast."""

from __future__ import annotations

import random

import pytest
import torch
from drafting import propose
from test_sampler import FILTERS, VOCAB, assert_distributed, batch_of, expected_probs, sampler_of
from torch import Tensor

from anabranch.llm.sampling.batch import Positions, SampleBatch, tree_arrays
from anabranch.llm.sampling.params import SamplingParams, SamplingRows
from anabranch.llm.sampling.sampler import Sampler
from anabranch.llm.sampling.verify import accept_equal, emit, walk_trees

MODES = FILTERS | {"greedy": {"temperature": 0.0}}
# Verification does not know who made a draft: with each mode once by the sampler, once otherwise
PROPOSALS = {
    "drawn by the sampler": list(MODES),
    "given": ["plain", "hot", "top_p", "greedy"],
    "drawn": ["temperature", "top_k", "min_p", "all"],
}


def test_accept_equal_counts_leading_matches_of_real_drafts() -> None:
    drawn = torch.tensor([[1, 2, 3, 9], [1, 2, 3, 9], [1, 0, 3, 9], [0, 2, 3, 9], [1, 2, 3, 9]])
    drafts = torch.tensor([[1, 2, 3]] * 5)
    accepted = accept_equal(drawn, drafts, torch.tensor([3, 2, 3, 3, 0]))
    assert accepted.tolist() == [3, 2, 1, 0, 0]
    assert emit(drawn, accepted).tolist() == [
        [1, 2, 3, 9],
        [1, 2, 3, 0],
        [1, 0, 0, 0],
        [0, 0, 0, 0],
        [1, 0, 0, 0],
    ]


def walked(drawn: list[int], drafts: list[int], parents: list[int]) -> list[int]:
    """Nodes of the path, by hand; siblings differ."""
    path = [0]
    while True:
        below = [node for node, parent in enumerate(parents, 1) if parent + 1 == path[-1]]
        right = [node for node in below if drafts[node - 1] == drawn[path[-1]]]
        if not right:
            return path
        path += right


@pytest.mark.parametrize("seed", range(20))
def test_trees_are_walked_as_by_hand(seed: int) -> None:
    """Padding repeats the tokens that would be right, and is not accepted."""
    draws, width = random.Random(seed), 7
    parents, drafts, drawn = list[list[int]](), list[list[int]](), list[list[int]]()
    for num_drafts in (0, 1, 3, 5, 6):
        parents.append([draws.randrange(-1, node) for node in range(num_drafts)])
        drafts.append([])
        for node, parent in enumerate(parents[-1]):
            taken = {drafts[-1][i] for i in range(node) if parents[-1][i] == parent}
            drafts[-1].append(draws.choice([token for token in range(1, 9) if token not in taken]))
        target = [draws.randrange(1, 9) for _ in range(width)]
        for node, parent in enumerate(parents[-1]):  # of a node, its last child is often right
            if draws.random() < 0.7:
                target[parent + 1] = drafts[-1][node]
        drawn.append(target)
    paths = [walked(*each) for each in zip(drawn, drafts, parents, strict=True)]
    arrays = tree_arrays(parents, width)
    above, depths = (torch.from_numpy(arrays[name]) for name in ("above", "depths"))
    padded = [
        each + [target[0]] * (width - 1 - len(each))
        for each, target in zip(drafts, drawn, strict=True)
    ]
    found = walk_trees(
        torch.tensor(drawn),
        torch.tensor(padded),
        torch.tensor([len(each) for each in drafts]),
        above,
        depths,
        int(depths.max()),
    )
    assert found.path is not None
    assert found.num_accepted.tolist() == [len(path) - 1 for path in paths]
    for place, path in enumerate(paths):
        assert found.path[place, : len(path)].tolist() == path
        assert found.path[place, len(path) :].tolist() == list(range(len(path), width))
        emitted = [drawn[place][node] for node in path]
        assert found.tokens[place].tolist() == emitted + [0] * (width - len(path))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("parents", [None, [[], [-1, 0, 0, 2], [-1, -1, 1]]])
def test_drafts_before_each_row_of_logits(parents: list[list[int]] | None, padded: bool) -> None:
    """Those of a chain, and the ancestors in a tree; -1 stands for the last token."""
    num_drafts = [0, 4, 3]
    drafts = torch.zeros(3, 4, dtype=torch.int64)
    given = {"num_drafts": num_drafts, "draft_tokens": drafts, "parents": parents}
    batch = batch_of(3, **given, padded=padded)
    positions = Positions.of(batch)
    firsts = [0, 5, 10] if padded else [0, 1, 6]
    expected = set[tuple[int, int]]()
    for seq, above in enumerate(parents or [[], [-1, 0, 1, 2], [-1, 0, 1]]):
        for node in range(num_drafts[seq]):
            draft = node
            while draft >= 0:
                expected.add((firsts[seq] + node + 1, seq * 4 + draft))
                draft = above[draft]
    own = {
        first + row for first, num in zip(firsts, num_drafts, strict=True) for row in range(num + 1)
    }
    rows, earlier = positions.earlier_drafts(batch)
    found = [pair for pair in zip(rows.tolist(), earlier.tolist(), strict=True) if pair[0] in own]
    assert set(found) == expected and len(found) == len(expected)
    assert batch.num_logits == len(positions.seqs) == (15 if padded else 10)
    assert positions.places[:, 0].tolist() == firsts


def conditional_tokens(tokens: Tensor, num_emitted: Tensor, position: int) -> Tensor:
    return tokens[num_emitted > position, position]


@pytest.mark.parametrize(
    ("proposal", "name"), [(way, name) for way, names in PROPOSALS.items() for name in names]
)
def test_every_emitted_token_is_distributed_as_the_target(name: str, proposal: str) -> None:
    num_seqs, num_drafts, params = 1000, 2, SamplingParams(**MODES[name])
    sampler = sampler_of(*[params] * num_seqs, first_seed=10**6)
    target = torch.randn(num_drafts + 1, VOCAB) * 1.2
    draft = target[:-1] + torch.randn(num_drafts, VOCAB) * 0.7
    found: list[tuple[Tensor, Tensor]] = []
    for start in range(0, 24, 3):
        if proposal == "given":
            tokens = target[:-1].argmax(1).expand(num_seqs, -1)
        elif proposal == "drawn":
            tokens = torch.multinomial(torch.softmax(draft, 1), num_seqs, replacement=True).t()
        else:
            drafted = [
                propose(sampler, logits.expand(num_seqs, -1), batch_of(num_seqs, start + step))
                for step, logits in enumerate(draft)
            ]
            tokens = torch.stack(drafted, 1)
        batch = batch_of(
            num_seqs, start, num_drafts=[num_drafts] * num_seqs, draft_tokens=tokens.contiguous()
        )
        output = sampler.sample(target.repeat(num_seqs, 1), batch)
        found.append((output.tokens, output.num_emitted))
    tokens, num_emitted = (torch.cat(part) for part in zip(*found, strict=True))
    assert num_emitted.max() == 3
    for position, logits in enumerate(target):
        emitted = conditional_tokens(tokens, num_emitted, position)
        assert_distributed(emitted, expected_probs(logits, params))


@pytest.mark.parametrize("blur", [0.2, 1.0])
def test_a_draft_with_the_same_noise_is_right_as_often_as_theory_says(blur: float) -> None:
    num_seqs = 4000
    target = torch.randn(2, VOCAB) * 1.5
    draft = target[0] + torch.randn(VOCAB) * blur
    p, q = torch.softmax(target[0], 0), torch.softmax(draft, 0)
    sampler = sampler_of(*[SamplingParams()] * num_seqs)
    tokens = propose(sampler, draft.expand(num_seqs, -1), batch_of(num_seqs))
    batch = batch_of(num_seqs, num_drafts=[1] * num_seqs, draft_tokens=tokens.unsqueeze(1))
    rate = sampler.sample(target.repeat(num_seqs, 1), batch).num_accepted.double().mean().item()
    races = torch.maximum(p[None] / p[:, None], q[None] / q[:, None]).sum(1)
    assert abs(rate - (1 / races).sum().item()) < 4 * 0.5 / num_seqs**0.5
    most = torch.minimum(p, q).sum().item()
    assert most / (2 - most) - 0.03 < rate < most + 0.03


def test_drafts_equal_to_the_target_are_always_accepted() -> None:
    logits = torch.randn(1, VOCAB) * 3
    sampler = sampler_of(*[SamplingParams(top_p=0.9, temperature=0.7)] * 500)
    tokens = propose(sampler, logits.expand(500, -1), batch_of(500))
    batch = batch_of(500, num_drafts=[1] * 500, draft_tokens=tokens.unsqueeze(1))
    output = sampler.sample(logits.expand(1000, -1), batch)
    assert (output.num_accepted == 1).all()
    assert torch.equal(output.last_tokens, output.tokens[:, 1])


REQUESTS = [
    SamplingParams(),
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.8, top_k=5, top_p=0.9, min_p=0.01),
    SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.3),
    SamplingParams(temperature=0, frequency_penalty=0.9, logit_bias={4: 1.0}),
    SamplingParams(temperature=0, repetition_penalty=1.4, min_tokens=9, logprobs=2),
    SamplingParams(top_p=0.8, min_tokens=6, stop_token_ids=[3, 5], max_tokens=None),
    SamplingParams(temperature=1.5, presence_penalty=-1.0, min_tokens=12, logprobs=0),
]
NUM_OUTPUTS = 24


def full_sampler() -> Sampler:
    sampler = Sampler(SamplingRows(len(REQUESTS), VOCAB), "cpu")
    for row, params in enumerate(REQUESTS):
        sampler.add(row, params, [1, 2], [], 50 + row, [0])
    return sampler


def one_by_one(model: Tensor) -> tuple[list[list[int]], list[list[float]]]:
    """What each request emits without drafts; `model` gives logits for the token before."""
    sampler, outputs = full_sampler(), [[1] for _ in REQUESTS]
    chosen: list[list[float]] = [[] for _ in REQUESTS]
    for position in range(NUM_OUTPUTS + 4):
        logits = model[[tokens[-1] for tokens in outputs]]
        found = sampler.sample(logits, batch_of(len(REQUESTS), position)).to_host().wait()
        assert found.logprobs is not None
        for row, emitted in enumerate(found.tokens):
            outputs[row] += emitted
            chosen[row] += found.logprobs[row].chosen.tolist()
    return [tokens[1:] for tokens in outputs], chosen


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
def test_outputs_are_the_same_with_and_without_drafts(padded: bool, right: float) -> None:
    model = torch.randn(VOCAB, VOCAB) * 2
    expected, expected_logprobs = one_by_one(model)
    sampler, outputs = full_sampler(), [list[int]() for _ in REQUESTS]
    chosen: list[list[float]] = [[] for _ in REQUESTS]
    num_steps = 0
    while active := [row for row, out in enumerate(outputs) if len(out) < NUM_OUTPUTS]:
        active = active[::-1] if num_steps % 2 else active
        num_drafts = torch.randint(0, 4, (len(active),)).tolist()
        drafts = torch.full((len(active), 3), -1)
        logits: list[Tensor] = []
        for seq, row in enumerate(active):
            start = len(outputs[row])
            oracle = torch.tensor(expected[row][start : start + num_drafts[seq]])
            wrong = torch.rand(len(oracle)) >= right
            drafts[seq, : len(oracle)] = torch.where(wrong, (oracle + 1) % VOCAB, oracle)
            before = [outputs[row][-1] if outputs[row] else 1, *drafts[seq].tolist()]
            logits.append(model[before if padded else before[: num_drafts[seq] + 1]])
        batch = SampleBatch(
            rows=active,
            num_outputs=[len(outputs[row]) for row in active],
            num_drafts=num_drafts,
            draft_tokens=drafts,
            padded=padded,
        )
        output = sampler.sample(torch.cat(logits), batch)
        found = output.to_host().wait()
        assert output.num_emitted.tolist() == [len(tokens) for tokens in found.tokens]
        assert output.last_tokens.tolist() == [tokens[-1] for tokens in found.tokens]
        for seq, row in enumerate(active):
            assert found.num_accepted[seq] <= num_drafts[seq]
            outputs[row] += found.tokens[seq]
            if found.logprobs is not None:
                chosen[row] += found.logprobs[seq].chosen.tolist()
        num_steps += 1
    for row, tokens in enumerate(outputs):
        assert tokens == expected[row][: len(tokens)]
        if REQUESTS[row].logprobs is not None:
            wanted = torch.tensor(expected_logprobs[row][: len(tokens)])
            torch.testing.assert_close(torch.tensor(chosen[row]), wanted, atol=1e-5, rtol=0)
    assert (num_steps < NUM_OUTPUTS) == (right > 0)


def test_greedy_rows_beside_drawn_ones_emit_what_they_would_alone() -> None:
    logits = torch.randn(6, VOCAB)
    logits[0, [2, 7]] = 9.0  # a tie: the first one is taken
    best = logits.argmax(1).tolist()
    sampler = sampler_of(SamplingParams(temperature=0), SamplingParams())
    drafts = torch.tensor([[best[0], best[1]], [0, 0]])
    batch = batch_of(2, num_drafts=[2, 2], draft_tokens=drafts)
    assert sampler.sample(logits, batch).to_host().wait().tokens[0] == best[:3]
    drafts[0, 1] = (best[1] + 1) % VOCAB
    assert sampler.sample(logits, batch).to_host().wait().tokens[0] == best[:2]


def test_bad_numbers_and_padding_with_drafts() -> None:
    sampler = sampler_of(*[SamplingParams(frequency_penalty=0.1)] * 3)
    logits = torch.randn(7, VOCAB)
    logits[0:2] = torch.nan
    logits[3] = -torch.inf
    drafts = torch.tensor([[4, -1], [5, 6], [7, -1]])
    batch = batch_of(3, num_drafts=[1, 2, 1], draft_tokens=drafts)
    found = sampler.sample(logits, batch).to_host().wait()
    assert found.tokens[0] == [] and found.tokens[1] and found.tokens[2]
    assert found.num_nan_rows == 1  # the second is after a rejected draft
    assert all(0 <= token < VOCAB for tokens in found.tokens for token in tokens)
