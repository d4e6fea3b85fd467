"""Trees of drafts: what is grown, how they are verified, and that no token changes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.compositions.tree import node_depths
from anabranch.kernels.cpu.move_rows import move_rows
from anabranch.kernels.triton.move_rows import move_rows as move_rows_triton
from anabranch.llm.runner.kv_cache import CacheRows, LayerCache, token_rows
from anabranch.llm.sampling.batch import SampleBatch, tree_arrays
from anabranch.llm.sampling.verify import walk_trees
from anabranch.llm.speculative.adaptive import FRESH, AdaptiveDrafts
from anabranch.llm.speculative.draft_chain import MAX_DEPTH
from anabranch.llm.speculative.draft_model import DraftTreeProposer
from anabranch.llm.speculative.ngram import Lookup, NgramIndex, first_chances
from anabranch.llm.speculative.proposer import AcceptanceRates, grow_tree, outcomes

pytest.importorskip("transformers")

from tiny_models import (
    GREEDY,
    VOCAB,
    as_on_gpu,
    assert_idle,
    blurred_source,
    one_by_one,
    outputs,
    pages,
    random_prompts,
    source,
    tiny,
)

from anabranch.llm.engine.config import EngineConfig, SpeculativeConfig
from anabranch.llm.engine.llm import LLM
from anabranch.llm.runner.step_layout import Scorer, lay_out
from anabranch.llm.sampling.params import SamplingParams
from anabranch.llm.sequences.sequence import Origin, Scheduled

TREE = {"method": "ngram", "min_ngram": 1, "adaptive": False, "tree_width": 3, "num_drafts": 7}
PROMPTS = random_prompts(lengths=(1, 15, 16, 17, 40))
IN_TURN_OR_FLIGHT = pytest.mark.parametrize("like_gpu", [False, True], ids=["in turn", "in flight"])
SAMPLED = SamplingParams(temperature=0.9, seed=5, max_tokens=24, ignore_eos=True)


# Verification


def random_parents(draws: random.Random, size: int) -> list[int]:
    return [draws.randrange(-1, node) for node in range(size)]


def walked(drawn: Sequence[int], drafts: Sequence[int], parents: Sequence[int]) -> list[int]:
    """The accepted drafts, by walking down from the last token."""
    path = [-1]
    while True:
        wanted = drawn[path[-1] + 1]
        right = [i for i, p in enumerate(parents) if p == path[-1] and drafts[i] == wanted]
        if not right:
            return path[1:]
        path.append(right[0])


@pytest.mark.parametrize("vocab", [2, 5], ids=["deep", "shallow"])
def test_a_walk_follows_the_tokens_drawn(vocab: int) -> None:
    draws = random.Random(vocab)
    num_seqs, most = 60, 12
    parents = [random_parents(draws, draws.randrange(most + 1)) for _ in range(num_seqs)]
    drawn = torch.randint(vocab, (num_seqs, most + 1), generator=torch.manual_seed(0))
    drafts = torch.randint(vocab, (num_seqs, most))
    for row, each in zip(drafts, parents, strict=True):  # no two siblings are equal
        for node, parent in enumerate(each):
            others = [row[i].item() for i in range(node) if each[i] == parent]
            row[node] = next((t for t in range(vocab) if t not in others), vocab + node)
    arrays = {name: torch.from_numpy(x) for name, x in tree_arrays(parents, most + 1).items()}
    sizes = torch.tensor([len(each) for each in parents])
    deepest = int(arrays["depths"].max())
    tokens, num_accepted, path = walk_trees(drawn, drafts, sizes, **arrays, deepest=deepest)
    assert path is not None
    lengths = set()
    for seq, each in enumerate(parents):
        accepted = walked(drawn[seq].tolist(), drafts[seq].tolist(), each)
        nodes = [0, *(draft + 1 for draft in accepted)]
        lengths.add(len(accepted))
        assert num_accepted[seq] == len(accepted)
        assert path[seq, : len(nodes)].tolist() == nodes
        assert tokens[seq, : len(nodes)].tolist() == drawn[seq, nodes].tolist()
        assert not tokens[seq, len(nodes) :].any()
    assert len(lengths) > 2


def test_bad_parents_are_refused_by_sequence_and_place() -> None:
    llm = tiny(speculative=TREE)
    seq = llm.engine.admission.sequence("abc", 2, [1, 2, 3], GREEDY, 0)
    for parents in ((-1, 2, 1), (-1, 0, 2), (-1, 0, -2)):
        node = 1 if parents[1] == 2 else 2
        wrong = f"sequence 2 of request abc, node {node} has parent {parents[node]}"
        with pytest.raises(ValueError, match=wrong):
            Scheduled(seq, 2, 4, 3, parents=parents)
        with pytest.raises(ValueError, match=f"sequence 1, node {node} has parent"):
            SampleBatch(rows=[0, 1], num_outputs=[0, 0], num_drafts=[0, 3],
                        draft_tokens=torch.zeros(2, 3), parents=[(), parents])  # fmt: skip
    with pytest.raises(ValueError, match="3 drafts, 2 parents"):
        Scheduled(seq, 2, 4, 3, parents=(-1, 0))
    with pytest.raises(ValueError, match=r"parents of \[0\] drafts"):
        SampleBatch(
            rows=[0], num_outputs=[0], num_drafts=[1], draft_tokens=torch.zeros(1, 1), parents=[()]
        )


def test_options_that_trees_cannot_have() -> None:
    assert SpeculativeConfig(tree_width=2, num_drafts=63).has_trees
    for options, wrong in (
        ({"tree_width": 2, "num_drafts": 64}, "from 1 to 63, got 64"),
        ({"tree_width": 0}, "tree_width must be from 1"),
        ({"tree_width": 17}, "got 17"),
        ({"tree_width": True}, "integer"),
        ({"tree_width": 2, "scorer": "batch-expansion"}, "needs scorer 'multi-query'"),
    ):
        with pytest.raises(ValueError, match=wrong):
            SpeculativeConfig(**options)
    with pytest.raises(ValueError, match="needs one rank, got 2"):
        EngineConfig(tensor_parallel=2, speculative=SpeculativeConfig(tree_width=2))
    windowed = source(model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=8)
    with pytest.raises(ValueError, match="windows of 8 keys"):
        LLM(windowed, device="cpu", speculative=TREE)


# Keys of accepted nodes


def random_moves(num_slots: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Slots, paths and numbers of accepted nodes of four sequences."""
    draws, width = random.Random(1), 9
    slots = torch.randperm(num_slots, generator=torch.manual_seed(2))[: 4 * width].view(4, width)
    path = torch.arange(width).repeat(4, 1)
    num_accepted = torch.tensor([0, 8, 3, 5])
    for row, count in zip(path, num_accepted.tolist(), strict=True):
        row[1 : count + 1] = torch.tensor(sorted(draws.sample(range(1, width), count)))
    return slots, path, num_accepted


def moved(rows: torch.Tensor, moves: tuple[torch.Tensor, ...]) -> torch.Tensor:
    expected = rows.clone()
    slots, path, num_accepted = moves
    for seq, count in enumerate(num_accepted.tolist()):
        for depth in range(1, count + 1):
            expected[slots[seq, depth]] = rows[slots[seq, path[seq, depth]]]
    return expected


@pytest.mark.parametrize("odd", [False, True], ids=["words", "bytes"])
@pytest.mark.parametrize("impl", ["torch", "triton", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_rows_of_accepted_nodes_are_moved(impl: str, odd: bool) -> None:
    """Codes, scales that lie heads first, and rows that are longer than what one program moves."""
    device = "cuda" if impl == "gpu" else "cpu"
    torch.manual_seed(0)
    shape, num_slots = (5, 16), 80
    caches = [
        LayerCache(torch.randn(*shape, 2, 8), torch.randn(*shape, 2, 600).to(torch.bfloat16)),
        LayerCache(
            torch.randint(-9, 9, (*shape, 1, 8 - odd), dtype=torch.int8),
            torch.rand(2, *shape).permute(1, 2, 0),
        ),
    ]
    caches = [LayerCache(cache.k.to(device), cache.v.to(device)) for cache in caches]
    moves = random_moves(num_slots)
    stores = [rows for cache in caches for rows in token_rows(cache)]
    assert [rows.shape[1] for rows in stores] == [64, 2400, 8 - odd, 4, 4]
    assert CacheRows(caches).word_bytes == (1 if odd else 4)
    expected = [moved(rows.cpu(), moves) for rows in stores]
    on_device = [part.to(device) for part in moves]
    if impl == "torch":
        move_rows(stores, *on_device)
    elif impl == "gpu":
        CacheRows(caches).move(*on_device)
    else:
        rows = CacheRows(caches)
        move_rows_triton(rows.table, rows.longest, rows.word_bytes, *on_device)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(stores, expected, strict=True))


def test_columns_of_the_keys_are_moved_with_them() -> None:
    k = torch.zeros(2, 4, 1, 8)
    assert len(list(token_rows(LayerCache(k, k[..., :4])))) == 1


# What is grown


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.integers(1, 2),
    st.integers(0, 2),
    st.integers(2, 3),
    st.integers(1, 12),
)
def test_a_tree_of_ngrams_is_of_passages(
    tokens: list[int], low: int, more: int, width: int, num_drafts: int
) -> None:
    drafts, parents = Lookup(low, low + more, width).grow(tokens, num_drafts)
    assert len(drafts) == len(parents) <= num_drafts
    chain = NgramIndex(low, low + more).propose(tokens, 1)
    assert drafts[:1] == chain, "the longest and latest comes first"
    for node, (draft, parent) in enumerate(zip(drafts, parents, strict=True)):
        siblings = [drafts[i] for i in range(node) if parents[i] == parent]
        assert draft not in siblings and len(siblings) < width
        path, above = list[int](), parent
        while above >= 0:
            path.insert(0, drafts[above])
            above = parents[above]
        ending = [*tokens, *path][-low:]
        seen = [tokens[i : i + low + 1] for i in range(len(tokens) - low)]
        assert [*ending, draft] in seen, "it has followed these tokens before"


def test_the_likeliest_nodes_are_grown() -> None:
    chances = {0: 0.6, 1: 0.3}

    def expand(node: tuple[int, ...]) -> list[tuple[float, tuple[int, ...]]]:
        return [(chance, (*node, rank)) for rank, chance in chances.items()]

    nodes, parents = grow_tree((), expand, 6)
    likely = [(0,), (0, 0), (1,), (0, 0, 0), (0, 1), (1, 0)]
    assert nodes == likely  # 0.6, 0.36, 0.3, 0.216, 0.18, 0.18
    assert parents == [-1, 0, -1, 1, 0, 2]
    assert node_depths(parents) == [len(node) for node in likely]


def test_outcomes_are_of_drafts_that_were_reached() -> None:
    parents = [-1, -1, 0, 1, 1, 3]
    assert list(outcomes(parents, [1, 4])) == [
        (0, False), (1, True), (3, False), (4, True),
    ]  # fmt: skip
    rates = AcceptanceRates(first_chances(2))
    before = rates.chance(1, 3)
    for _ in range(2000):
        rates.add(1, 3, True)
    assert before < 0.2 and rates.chance(1, 3) > 0.95
    for _ in range(2000):
        rates.add(1, 3, False)
    assert rates.chance(1, 3) < 0.2, "what is long ago is forgotten"


def test_a_lookup_learns_which_rank_is_right() -> None:
    """After 1 came 2 and 3, lately 3. Where 2 is right every time, it is tried first."""
    tokens = [1, 2, 9, 1, 2, 8, 1, 3, 7, 1]
    lookup = Lookup(1, 2, 2)
    drafts, parents = lookup.grow(tokens, 1)
    assert (drafts, parents) == ([3], [-1])
    for _ in range(80):
        drafts, parents = lookup.grow(tokens, 4)
        lookup.learn(parents, [drafts.index(2)])
    assert lookup.grow(tokens, 1)[0] == [2]


def test_sizes_of_trees_are_judged_by_what_they_brought() -> None:
    adaptive = AdaptiveDrafts(8, has_trees=True)
    for number, accepted in ((8, 2), (4, 2), (2, 1)):
        for _ in range(20):
            adaptive.count(number, accepted, 100)
            adaptive.count(number, 0, number - 1)  # cut by the end of the sequence
    assert adaptive.expected_tokens(4) == adaptive.expected_tokens(8) == 3
    assert adaptive.expected_tokens(1) == 1 + 2 / 8, "not tried"
    for number, ms in ((0, 1.0), (1, 1.1), (2, 1.1), (4, 1.2), (8, 2.0)):
        for _ in range(1 + FRESH):
            adaptive.observe(1, number, ms)
    assert adaptive.choose(1) == 4


# In the engine


class KnownTrees:
    """Trees of random shape with the right tokens somewhere in them."""

    on_device = False

    def __init__(self, known: dict[tuple[int, ...], list[list[int]]]) -> None:
        self._known = known
        self._draws = random.Random(3)
        self.moved = 0

    def prepare(self, seqs: Any, num_drafts: int) -> None:
        for seq in seqs:
            right = self._known[tuple(seq.tokens[: seq.prompt_len])][seq.index]
            left, tip = right[seq.num_output :], -1
            seq.drafts, seq.draft_parents = [], []
            for node in range(num_drafts):
                if left and self._draws.random() < 0.5:
                    seq.drafts.append(left.pop(0))
                    seq.draft_parents.append(tip)
                    tip = node
                else:
                    seq.drafts.append(self._draws.randrange(2, VOCAB))
                    seq.draft_parents.append(self._draws.randrange(-1, node))
            seq.num_drafts = num_drafts

    def propose(self, *_: Any) -> None: ...

    def finish(self, run: Any, accepted: Sequence[int]) -> None:
        self.moved += any(draft != depth for depth, draft in enumerate(accepted))

    def forget(self, seq: Any) -> None: ...


def known_trees(
    prompts: Any, params: Any, like_gpu: bool = False, **options: Any
) -> tuple[LLM, KnownTrees, Any]:
    """An engine with such trees, and what it answers without drafts."""
    stored = {name: options[name] for name in ("kv_cache_dtype",) if name in options}
    plain = tiny(**stored).generate(prompts, params)
    answers = {
        tuple(answer.prompt_token_ids): [output.token_ids for output in answer.outputs]
        for answer in plain
    }
    llm = tiny(speculative=TREE, **options)
    if like_gpu:
        as_on_gpu(llm)
    proposer = KnownTrees(answers)
    llm.engine._proposer = proposer  # type: ignore[assignment]
    llm.engine._launcher._proposer = proposer  # type: ignore[assignment]
    return llm, proposer, plain


def tokens_of(answers: Any) -> list[list[list[int]]]:
    return [[output.token_ids for output in answer.outputs] for answer in answers]


PARAMS: dict[str, SamplingParams] = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "several": replace(SAMPLED, n=3, top_k=20, max_tokens=12),
    "penalised": replace(
        SAMPLED, repetition_penalty=1.2, frequency_penalty=0.4, min_tokens=9, ignore_eos=False
    ),
}


@IN_TURN_OR_FLIGHT
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_tokens_do_not_depend_on_trees(params: SamplingParams, like_gpu: bool) -> None:
    llm, proposer, plain = known_trees(PROMPTS, params, like_gpu, max_num_batched_tokens=64)
    assert tokens_of(llm.generate(PROMPTS, params)) == tokens_of(plain)
    stats = llm.stats.speculative
    assert proposer.moved > 5 and stats.num_accepted_tokens > stats.num_drafts
    assert stats.num_draft_tokens > stats.num_accepted_tokens
    assert_idle(llm)


@IN_TURN_OR_FLIGHT
@pytest.mark.parametrize("tree_width", [2, 4])
def test_trees_of_ngrams_change_no_token(tree_width: int, like_gpu: bool) -> None:
    llm = tiny(speculative=TREE | {"tree_width": tree_width, "num_drafts": 9})
    if like_gpu:
        as_on_gpu(llm)
    prompt = [5, 6, 7, 5, 6, 8, 5, 6, 9, 5, 6]
    biased = replace(SAMPLED, logit_bias={token: 9.0 for token in range(5, 10)})
    for params in (GREEDY, biased):
        assert outputs(llm, [prompt], params) == outputs(tiny(), [prompt], params)
    stats = llm.stats.speculative
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


def test_a_preempted_sequence_keeps_its_tokens() -> None:
    prompts, params = random_prompts(4, [20, 21, 22]), replace(GREEDY, max_tokens=60)
    llm, proposer, plain = known_trees(
        prompts, params, kv_cache_gib=pages(11), max_num_seqs=3, max_model_len=128
    )
    assert tokens_of(llm.generate(prompts, params)) == tokens_of(plain)
    assert llm.stats.num_preemptions > 0 and proposer.moved > 0


def test_codes_and_scales_are_moved_together() -> None:
    llm, proposer, plain = known_trees(PROMPTS[2:], GREEDY, kv_cache_dtype="int8")
    assert tokens_of(llm.generate(PROMPTS[2:], GREEDY)) == tokens_of(plain)
    assert proposer.moved > 3


def test_moved_keys_are_found_by_other_requests() -> None:
    llm, proposer, plain = known_trees([PROMPTS[3]], replace(GREEDY, max_tokens=60))
    (first,) = outputs(llm, [PROMPTS[3]], replace(GREEDY, max_tokens=60))
    assert [[first]] == tokens_of(plain) and proposer.moved > 3
    follow_up = PROMPTS[3] + first
    (found,) = llm.generate([follow_up], replace(GREEDY, speculate=False))
    assert found.num_cached_tokens == (len(follow_up) - 1) // 16 * 16 > 60
    assert [found.outputs[0].token_ids] == one_by_one(tiny(), [follow_up])


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 11])
def test_an_end_within_an_accepted_path(max_tokens: int) -> None:
    params = replace(GREEDY, max_tokens=24)
    (tokens,) = outputs(tiny(), [PROMPTS[4]], params)
    stop = tokens[max_tokens - 1]
    cut = tokens[: tokens.index(stop) + 1]
    for one, reason, expected in (
        (replace(params, max_tokens=max_tokens), "length", tokens[:max_tokens]),
        (replace(params, stop_token_ids=[stop]), "stop", cut),
    ):
        llm, _, _ = known_trees([PROMPTS[4]], params)
        output = llm.generate([PROMPTS[4]], one)[0].outputs[0]
        assert (output.token_ids, output.finish_reason) == (expected, reason)
        assert_idle(llm)


def test_a_tree_at_the_end_of_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes are no deeper than the last position, though there are more of them."""
    prompt, params = PROMPTS[4], replace(GREEDY, max_tokens=None)
    long = replace(GREEDY, max_tokens=64)
    llm, proposer, _ = known_trees([prompt], long, max_model_len=64)
    runner, last = llm.engine._launcher._built.runner, list[int]()
    forward = runner.forward

    def watched(ids: Any, positions: torch.Tensor, *rest: Any) -> torch.Tensor:
        last.append(int(positions.max()))
        return forward(ids, positions, *rest)

    monkeypatch.setattr(runner, "forward", watched)
    (found,) = outputs(llm, [prompt], params)
    assert len(prompt) + len(found) == 64 and proposer.moved
    assert max(last) <= 63
    assert [found] == outputs(tiny(max_model_len=64), [prompt], params)


@IN_TURN_OR_FLIGHT
def test_logprobs_are_those_of_the_accepted_nodes(like_gpu: bool) -> None:
    params = replace(SAMPLED, logprobs=3)
    llm, proposer, plain = known_trees(PROMPTS[:3], params, like_gpu)
    found = llm.generate(PROMPTS[:3], params)
    assert proposer.moved > 3
    for one, other in zip(found, plain, strict=True):
        ours, theirs = one.outputs[0].logprobs, other.outputs[0].logprobs
        assert ours is not None and theirs is not None
        for a, b in zip(ours, theirs, strict=True):
            assert a.keys() == b.keys()
            assert all(abs(a[token].logprob - b[token].logprob) < 1e-4 for token in a)


def test_origins_and_counts_of_trees() -> None:
    llm, _, _ = known_trees(PROMPTS, GREEDY)
    found = [answer.outputs[0] for answer in llm.generate(PROMPTS, GREEDY)]
    stats = llm.stats.speculative
    origins = [origin for output in found for origin in output.origins]
    assert origins.count(Origin.ACCEPTED) == stats.num_accepted_tokens
    assert 0 < origins.count(Origin.CORRECTED) < stats.num_drafts, "some paths end in leaves"
    assert stats.accepted_at == sorted(stats.accepted_at, reverse=True)
    assert all(a <= d for a, d in zip(stats.accepted_at, stats.drafted_at, strict=True))
    assert stats.drafted_at[0] == stats.num_drafts


# By a draft model


def draft_trees(model: str, **options: Any) -> dict[str, Any]:
    return {"method": "draft", "model": model, "adaptive": False} | TREE_SHAPE | options


TREE_SHAPE = {"tree_width": 2, "num_drafts": 7}


@IN_TURN_OR_FLIGHT
@pytest.mark.parametrize("apart", [False, True], ids=["as it grows", "first choices apart"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_trees_of_a_draft_model_that_is_the_target(
    params: SamplingParams, apart: bool, like_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first choices are all right, as long as its own keys were moved, too."""
    llm = tiny(speculative=draft_trees(source()))
    if like_gpu:
        as_on_gpu(llm)
    proposer = llm.engine._proposer
    assert proposer is not None
    finish, first, other = proposer.finish, 0, 0

    def watched(run: Scheduled, accepted: Sequence[int]) -> None:
        nonlocal first, other
        path, parents = list[int](), run.parents or ()
        while (tip := path[-1] if path else -1) in parents:
            path.append(parents.index(tip))
        first += list(accepted) == path
        other += list(accepted) != path
        finish(run, accepted)

    monkeypatch.setattr(proposer, "finish", watched)
    if apart:  # siblings between the first choices, so that every accepted path is moved
        shape = [-1, -1, 0, 0, 2, 2, 4]
        monkeypatch.setattr(proposer, "shape", lambda num_drafts: shape[:num_drafts])
    assert outputs(llm, PROMPTS, params) == outputs(tiny(), PROMPTS, params)
    assert first > 10 and not other


FILTERED = replace(SAMPLED, top_k=30, top_p=0.95)


@pytest.mark.parametrize(
    ("params", "like_gpu"),
    [(GREEDY, False), (SAMPLED, False), (FILTERED, True)],
    ids=["greedy, in turn", "sampled, in turn", "filtered, in flight"],
)
def test_trees_of_a_draft_model_change_no_token(params: SamplingParams, like_gpu: bool) -> None:
    llm = tiny(speculative=draft_trees(blurred_source(0.2), tree_width=3), max_num_seqs=2)
    if like_gpu:
        as_on_gpu(llm)
    prompts, params = PROMPTS[1:4], replace(params, max_tokens=16)
    assert outputs(llm, prompts, params) == outputs(tiny(), prompts, params)
    stats = llm.stats.speculative
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


def test_a_tree_brings_more_than_a_chain_of_as_many_drafts() -> None:
    tree, chain = (
        tiny(speculative=draft_trees(blurred_source(0.2), tree_width=width)) for width in (3, 1)
    )
    assert outputs(tree, PROMPTS[1:4]) == outputs(chain, PROMPTS[1:4])
    ours, theirs = tree.stats.speculative, chain.stats.speculative
    assert ours.acceptance_length > theirs.acceptance_length


def test_sizes_of_trees_may_change_from_step_to_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft model catches up with steps it was not asked for."""
    llm = tiny(speculative=draft_trees(source()), max_num_batched_tokens=20, max_num_seqs=4)
    as_on_gpu(llm)
    numbers = itertools.cycle([7, 0, 0, 2, 1])
    monkeypatch.setattr(AdaptiveDrafts, "choose", lambda *_, **__: next(numbers))
    assert outputs(llm, PROMPTS) == outputs(tiny(), PROMPTS)
    assert llm.stats.speculative.accepted_at[0] == llm.stats.speculative.num_drafts


def test_the_shape_follows_what_was_accepted() -> None:
    llm = tiny(speculative=draft_trees(source(), tree_width=3))
    proposer = llm.engine._proposer
    assert isinstance(proposer, DraftTreeProposer)
    for rank, right in ((0, True), (1, False), (2, False)):
        for depth in range(MAX_DEPTH):
            for _ in range(200):
                proposer.rates.add(rank, depth, right)
    assert proposer.shape(7) == [-1, 0, 1, 2, 3, 4, 5], "first choices are always right"
    assert len(proposer.shape(63)) <= 3 + 9 * (MAX_DEPTH - 1)
    for rank in (0, 1):
        for depth in range(MAX_DEPTH):
            for _ in range(400):
                proposer.rates.add(rank, depth, rank == 1)
    parents = proposer.shape(7)
    assert max(node_depths(parents)) < 5 and parents.count(-1) > 1, "first choices are often wrong"


def test_layout_of_trees() -> None:
    """Known tokens form a chain; padding follows the context; long runs stay causal."""
    llm = tiny(speculative=TREE)
    tokens, runs = list(range(2, 92)), list[Scheduled]()
    for start, count, drafts, padding, parents in (
        (9, 5, 3, 1, (-1, -1, 0)),
        (4, 3, 0, 0, None),
        (0, 90, 0, 0, None),
    ):
        seq = llm.engine.admission.sequence("a", 0, tokens, GREEDY, 0)
        seq.row = len(runs)
        seq.drafts = [1] * drafts
        assert seq.pages.grow(start + count)
        runs.append(Scheduled(seq, start, count, drafts, padding, parents=parents))
    layout = lay_out(runs, Scorer.MULTI_QUERY, 16, 8, False, trees=True)
    assert layout.parents is not None and layout.short == (8, 2)
    assert layout.parents.tolist() == [-1, 0, 0, 1, -1, -1, 0, 1]
    assert lay_out(runs, Scorer.MULTI_QUERY, 16, 8, False).parents is None
    assert np.array_equal(layout.positions[8:], np.arange(90))
    for run in runs:
        run.seq.pages.release()
