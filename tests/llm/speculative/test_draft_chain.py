"""Drafts by one chain of passes on the device: those of a pass at a time, padded or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from drafting import propose
from tiny_models import (
    VOCAB,
    CalledGraphs,
    as_on_gpu,
    blurred_source,
    one_by_one,
    outputs,
    random_prompts,
    tiny,
)

from anabranch.llm.engine.llm import LLM
from anabranch.llm.runner.step_inputs import ALIGNMENT, FixedArrays
from anabranch.llm.sampling.batch import SampleBatch
from anabranch.llm.sampling.params import SamplingParams, SamplingRows
from anabranch.llm.sampling.sampler import Sampler
from anabranch.llm.sequences.sequence import Scheduled
from anabranch.llm.speculative.draft_chain import ChainKey, DraftChain, chain_keys
from anabranch.llm.speculative.draft_draws import DraftDraws, Kind

DRAFT = {"method": "draft", "model": blurred_source(), "adaptive": False}
LENGTHS = [2, 15, 16, 17, 18, 70]  # around the size of a page
SAMPLED: dict[str, list[dict[str, Any]]] = {
    "greedy": [{"temperature": 0}],
    "temperature": [{"temperature": 0.7}],
    "min_p": [{"min_p": 0.05}, {"temperature": 1.3}],
    "top_p": [{"top_p": 0.8}],
    "top_k": [{"top_k": 5}, {"top_k": 64}],
    "mixed": [{"temperature": 0}, {"temperature": 0.9, "top_k": 7, "top_p": 0.9}, {"top_k": 1}],
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return tiny(speculative=DRAFT, max_num_seqs=11)


def chain_of(llm: LLM) -> DraftChain:
    chain = llm.engine._launcher._built.draft
    assert chain is not None
    return chain


def start(
    llm: LLM, lengths: list[int], drafts: list[int], options: list[dict[str, Any]] | None = None
) -> list[Scheduled]:
    """Sequences of these lengths whose last token is to run, with so many drafts behind it.

    The draft model has computed all of their tokens but the last two.
    """
    options, num_rows = options or [{"temperature": 0}], llm.engine.limits.max_num_seqs
    draws = torch.Generator().manual_seed(sum(lengths))
    runs: list[Scheduled] = []
    for place, (length, number) in enumerate(zip(lengths, drafts, strict=True)):
        ids = torch.randint(2, VOCAB, (length,), generator=draws).tolist()
        params = SamplingParams(**options[place % len(options)])
        seq = llm.engine.admission.sequence(str(place), 0, ids, params, 100 + place)
        seq.prompt_len, seq.row = length - 1, 3 * place % num_rows
        assert seq.pages.grow(length + number)
        runs.append(Scheduled(seq, length - 1, 1 + number, number))
    for run in runs:
        llm.engine._launcher.own_row(run.seq)
    known = [Scheduled(run.seq, 0, run.start - 1, samples=False) for run in runs if run.start > 1]
    for run in known:
        chain_of(llm).runner.run([run])
    return runs


@contextmanager
def started(*args: Any, **options: Any) -> Iterator[list[Scheduled]]:
    runs = start(*args, **options)
    yield runs
    for run in runs:
        run.seq.pages.release()


Choose = Callable[[torch.Tensor, list[Scheduled], int], torch.Tensor]


def a_pass_at_a_time(llm: LLM, runs: list[Scheduled], choose: Choose) -> list[list[int]]:
    """Drafts, each reported to the host and run like a known token."""
    runner, drafts = chain_of(llm).runner, [list[int]() for _ in runs]
    parts = [Scheduled(run.seq, run.start - 1, 2, by_draft_model=True) for run in runs]
    active = list(range(len(runs)))
    for place in range(max(run.num_drafts for run in runs)):
        tokens = choose(runner.run(parts).rows, [runs[i] for i in active], place)
        for i, token in zip(active, tokens.tolist(), strict=True):
            runs[i].seq.tokens.append(token)
            drafts[i].append(token)
        active = [i for i in active if runs[i].num_drafts > place + 1]
        parts = [
            Scheduled(runs[i].seq, runs[i].start + 1 + place, 1, by_draft_model=True)
            for i in active
        ]
    for run in runs:
        del run.seq.tokens[run.start + 1 :]
    return drafts


def by_sampler(llm: LLM, runs: list[Scheduled]) -> Choose:
    """Every draft by the sampler that verifies, with the parameters of its request."""
    table = llm.engine._launcher._built.unseen
    sampler = Sampler(SamplingRows(len(table), VOCAB), table.device)
    for run in runs:
        sampler.add(run.seq.row or 0, run.seq.params, [], [], run.seq.seed)

    def choose(logits: torch.Tensor, active: list[Scheduled], place: int) -> torch.Tensor:
        rows = [run.seq.row or 0 for run in active]
        outputs = [run.seq.num_output - place for run in active]
        assert outputs == [1] * len(active), "drafts are no outputs"
        batch = SampleBatch(
            rows=rows, num_outputs=[1 + place] * len(rows), num_drafts=[0] * len(rows)
        )
        return propose(sampler, logits, batch)

    return choose


def chained(llm: LLM, runs: list[Scheduled]) -> list[list[int]]:
    """Drafts as the table of unseen tokens has them."""
    unseen = llm.engine._launcher._built.unseen
    unseen.fill_(-1)
    chain_of(llm).draft(runs)
    table: list[list[int]] = unseen.tolist()
    drafts = [table[run.seq.row or 0][1 : 1 + run.num_drafts] for run in runs]
    assert all(row[0] == -1 for row in table), "the last tokens of steps are elsewhere"
    return drafts


@pytest.mark.parametrize("options", SAMPLED.values(), ids=SAMPLED)
@pytest.mark.parametrize("lengths", [[17], [2, 3], LENGTHS], ids=["one", "two", "six"])
def test_a_chain_gives_the_bits_of_a_pass_at_a_time(
    llm: LLM, lengths: list[int], options: list[dict[str, Any]]
) -> None:
    with started(llm, lengths, [4] * len(lengths), options) as runs:
        caches = [layer.anabranch_cache for layer in chain_of(llm).runner._layers]
        drafts = chained(llm, runs)
        kept = [(cache.k.clone(), cache.v.clone()) for cache in caches]
        assert drafts == a_pass_at_a_time(llm, runs, by_sampler(llm, runs))
        for cache, (k, v) in zip(caches, kept, strict=True):
            assert torch.equal(cache.k, k) and torch.equal(cache.v, v)


@contextmanager
def graphs(chain: DraftChain, keys: list[ChainKey]) -> Iterator[None]:
    """Run chains of these shapes, padded."""
    before, chain.graphs = chain.graphs, CalledGraphs()
    chain.capture(keys)
    try:
        yield
    finally:
        chain.graphs = before


SHAPES = {"as they are": [], "padded": chain_keys([1, 2, 4], [1, 2, 4, 8, 11])}


@pytest.mark.parametrize("keys", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("options", SAMPLED.values(), ids=SAMPLED)
def test_numbers_of_drafts_may_differ(
    llm: LLM, options: list[dict[str, Any]], keys: list[ChainKey]
) -> None:
    for drafts in ([1, 4, 2, 1, 3, 1], [1] * 6, [3, 2, 2, 1, 1, 2], [2, 1]):
        with (
            started(llm, LENGTHS[: len(drafts)], drafts, options) as runs,
            graphs(chain_of(llm), keys),
        ):
            assert chained(llm, runs) == a_pass_at_a_time(llm, runs, by_sampler(llm, runs))


def assert_keeps_only_its_own(llm: LLM, runs: list[Scheduled]) -> None:
    """Draft, and see which keys are written."""
    chain = chain_of(llm)
    caches: list[Any] = [layer.anabranch_cache for layer in chain.runner._layers]
    for cache in caches:
        cache.k.fill_(7.0)
        cache.v.fill_(7.0)
    chain.draft(runs)
    written = {
        (run.seq.pages.pages[place // 16], place % 16)
        for run in runs
        for place in range(run.start - 1, run.start + run.num_drafts)
    }
    for cache in caches:
        changed = (cache.k != 7).flatten(2).any(2).nonzero().tolist()
        assert {(page, row) for page, row in changed} == written


def test_inert_sequences_keep_nothing_and_write_no_row_of_another(llm: LLM) -> None:
    chain = chain_of(llm)
    with (
        started(llm, LENGTHS, [4, 1, 4, 2, 3, 4]) as runs,
        graphs(chain, [ChainKey(4, Kind.BEST, 11)]),
    ):
        assert_keeps_only_its_own(llm, runs)
        rows = chain._inputs.rows(11).tolist()
        assert sorted(rows) == list(range(11)), "no row twice"
        assert rows[:6] == [run.seq.row for run in runs]


def test_drafts_of_a_large_top_k_come_from_fewer_tokens(llm: LLM) -> None:
    draws = DraftDraws(llm.engine._launcher._built.rows, 2, torch.device("cpu"))
    with started(llm, [5, 5], [2, 2], [{"top_k": 90}, {"top_k": 3}]) as runs:
        assert draws.kind(runs) is Kind.FILTERED
        draws.load(runs, 2)
        scores = torch.randn(2, VOCAB)
        kept = draws._filter(scores.clone(), scores.argmax(1), Kind.FILTERED).isfinite()
        assert kept.sum(1).tolist() == [64, 3]
        tokens = draws.choose(scores, 1, Kind.FILTERED)
        assert kept.gather(1, tokens[:, None]).all()


def test_a_step_of_drafts_is_one_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft model runs by itself for prompts only, whatever drafts are left at the end."""
    llm = as_on_gpu(tiny(speculative=DRAFT, max_num_seqs=8))
    chain = chain_of(llm)
    chains: list[ChainKey] = []
    alone: list[bool] = []
    replay, run = chain.graphs.replay, chain.runner.run

    def counted_replay(key: ChainKey) -> torch.Tensor:
        chains.append(key)
        return replay(key)

    def counted_run(step: Any) -> Any:
        alone.append(all(part.start + part.num_tokens <= part.seq.prompt_len for part in step))
        return run(step)

    monkeypatch.setattr(chain.graphs, "replay", counted_replay)
    monkeypatch.setattr(chain.runner, "run", counted_run)
    prompts = random_prompts(3, (1, 20, 33, 5, 17))
    assert outputs(llm, prompts) == one_by_one(tiny(), prompts)
    assert alone and all(alone)
    speculative = llm.stats.speculative
    assert len(prompts) <= speculative.num_drafts <= len(prompts) * len(chains)
    assert {key.kind for key in chains} == {Kind.BEST}
    assert llm.generate(prompts, SamplingParams(temperature=0.8, seed=1, ignore_eos=True))
    assert {key.kind for key in chains} == {Kind.BEST, Kind.DRAWN}


def test_arrays_lie_where_they_were() -> None:
    fields = {"a": (torch.bool, (3,)), "b": (torch.float64, (2, 3)), "c": (torch.int32, (4, 5))}
    arrays = FixedArrays(fields, torch.device("cpu"))
    views = dict(arrays.tensors)
    for count in range(3):
        host = arrays.write()
        host["a"][:] = [True, False, bool(count)]
        host["b"][:] = np.arange(6).reshape(2, 3) + count
        host["c"][:] = count + 1
        arrays.send(4 - count)
        assert views["a"].tolist() == [True, False, bool(count)]
        assert views["b"].flatten().tolist() == [i + count for i in range(6)]
    assert views["c"][:, 0].tolist() == [3, 3, 2, 1], "of the last only some rows"
    assert all(view.data_ptr() % ALIGNMENT == views["a"].data_ptr() % ALIGNMENT
               for view in views.values())  # fmt: skip
    assert {name: (view.dtype, tuple(view.shape)) for name, view in views.items()} == fields


def test_greedy_runs_need_no_draws(llm: LLM) -> None:
    with started(llm, [9, 9], [1, 1], [{"temperature": 0}, {"top_k": 1}]) as runs:
        assert chain_of(llm)._draws.kind(runs) is Kind.BEST
