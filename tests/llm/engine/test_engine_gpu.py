"""The engine on a GPU: graphs against eager steps bit for bit, equal tokens, no waiting."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from test_draft_chain import (
    SAMPLED,
    a_pass_at_a_time,
    assert_keeps_only_its_own,
    by_sampler,
    chain_of,
    chained,
    started,
)
from test_draft_chain import graphs as called_chains
from test_engine import DRAFT, ENGINES, NGRAM, PROMPTS, TREE
from tiny_models import (
    GREEDY,
    VOCAB,
    CalledGraphs,
    one_by_one,
    outputs,
    random_prompts,
    source,
    tiny,
)

from anabranch.llm.engine import launch as launch_module
from anabranch.llm.engine.llm import LLM
from anabranch.llm.runner.graphs import GraphKey, Graphs, graph_batches
from anabranch.llm.runner.model_runner import ModelRunner
from anabranch.llm.sampling import batch as batch_module
from anabranch.llm.sampling.params import SamplingParams
from anabranch.llm.sequences.sequence import Scheduled
from anabranch.llm.speculative.draft_chain import chain_keys

pytestmark = pytest.mark.gpu
LENGTH, Q_LEN, NUM_SEQS = 259, 3, 8  # where graphs once went wrong, in another library
WIDTHS = {17: 17 * 16 - 2, 256: 256 * 16 - 2}  # pages of a table by max_model_len, with two drafts
ON_GPU = {"device": "cuda", "dtype": "float32", "kv_cache_gib": 0.01}
HERE: dict[str, dict[str, Any]] = {
    "merge apart": {"fused_merge": False},
    "n-gram tree": {"speculative": NGRAM | TREE},
    "n-gram tree, adaptive": {"speculative": NGRAM | TREE | {"adaptive": True}},
    "draft tree": {"speculative": DRAFT | TREE},
    "draft tree, preempted": ENGINES["draft, preempted"] | {"speculative": DRAFT | TREE},
}
SELECTED = (
    "batched",
    *HERE,
    "chunked",
    "preempted",
    "n-gram",
    "n-gram, expanded",
    "n-gram, preempted",
    "draft",
    "draft, adaptive",
    "draft, chunked",
    "draft, preempted",
    "one draft",
    "n-gram tree, chunked",
)


def build(max_model_len: int, dtype: str) -> LLM:
    shape = {"max_position_embeddings": 4096, "hidden_size": 128, "head_dim": 32}
    return LLM(
        source(**shape),
        device="cuda",
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=NUM_SEQS,
        max_num_batched_tokens=4096,
        kv_cache_gib=0.25,
        speculative=NGRAM | {"num_drafts": Q_LEN - 1},
    )


def runner_of(llm: LLM) -> ModelRunner:
    return llm.engine._launcher._built.runner


@contextmanager
def graphs(runner: ModelRunner, other: Graphs) -> Iterator[None]:
    """Run with other graphs than were captured."""
    captured, runner.graphs = runner.graphs, other
    try:
        yield
    finally:
        runner.graphs = captured


def make_step(llm: LLM, lengths: list[int], q_len: int) -> list[Scheduled]:
    """Sequences of these lengths whose last `q_len` tokens are still to run; the rest is cached."""
    engine = llm.engine
    draws = torch.Generator().manual_seed(sum(lengths))
    step: list[Scheduled] = []
    for row, length in enumerate(lengths):
        ids = torch.randint(2, VOCAB, (length,), generator=draws).tolist()
        known = length - q_len + 1
        seq = engine.admission.sequence(str(row), 0, ids[:known], GREEDY, 0)
        seq.prompt_len = known - 1
        seq.drafts, seq.row = ids[known:], row
        assert seq.pages.grow(length)
        step.append(Scheduled(seq, known - 1, q_len, q_len - 1))
    cached = [Scheduled(run.seq, 0, run.start, samples=False) for run in step if run.start]
    with graphs(runner_of(llm), Graphs()):
        for run in cached:
            runner_of(llm).run([run])
    return step


def release(step: list[Scheduled]) -> None:
    for run in step:
        run.seq.pages.release()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("width", WIDTHS)
def test_graphs_give_the_bits_of_eager_steps(width: int, dtype: str) -> None:
    llm = build(WIDTHS[width], dtype)
    runner = runner_of(llm)
    longest = WIDTHS[width] - Q_LEN
    called = CalledGraphs()
    with graphs(runner, called):
        runner.capture(
            [GraphKey(q, batch) for q in (1, Q_LEN) for batch in graph_batches(NUM_SEQS)]
        )
    for q_len in (Q_LEN, 1):
        batches = [[LENGTH] * batch for batch in range(1, NUM_SEQS + 1)]
        batches += [[longest] * NUM_SEQS, [q_len] * 5, [16, 17, 15, 1 + q_len, 200, 33, longest]]
        for lengths in batches:
            step = make_step(llm, lengths, q_len)
            replayed = runner.run(step)
            assert replayed.every == q_len, "a graph was used"
            rows = replayed.rows.clone()
            with graphs(runner, called):
                same_shape = runner.run(step)
            assert same_shape.every == q_len
            assert torch.equal(rows, same_shape.rows), (lengths, q_len)
            with graphs(runner, Graphs()):
                unpadded = runner.run(step)
            assert unpadded.every is None and rows.isfinite().all()
            torch.testing.assert_close(
                rows, unpadded.rows, rtol=0, atol=rows.abs().max().item() * TOLERANCE[dtype]
            )
            again = runner.run(step)
            assert torch.equal(rows, again.rows), "and twice the same"
            release(step)
    assert llm.engine.pool.num_free == llm.engine.pool.num_pages


# Of the largest logit: other tiles for other numbers of rows round differently, in two layers.
TOLERANCE = {"bfloat16": 2**-5, "float32": 2**-16}


def test_padded_rows_are_inert() -> None:
    llm = build(WIDTHS[17], "float32")
    runner = runner_of(llm)
    step = make_step(llm, [LENGTH] * 5, Q_LEN)  # in a graph of eight
    used = torch.tensor([page for run in step for page in run.seq.pages.pages])
    others = torch.ones(llm.engine.pool.num_pages, dtype=torch.bool)
    others[used] = False
    caches: list[Any] = [layer.anabranch_cache for layer in runner._layers]
    for cache in caches:
        cache.k[others.cuda()] = 7.0
        cache.v[others.cuda()] = 7.0
    assert runner.run(step).every == Q_LEN
    for cache in caches:
        assert (cache.k[others.cuda()] == 7).all() and (cache.v[others.cuda()] == 7).all()
        first = step[0].seq.pages.pages[LENGTH // 16]
        assert not (cache.k[first, LENGTH % 16 - 1] == 7).any(), "the last token is kept"


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def drafting(request: pytest.FixtureRequest) -> LLM:
    """An engine with a draft model of one layer, whose chains are captured."""
    shape = {"max_position_embeddings": 4096, "hidden_size": 128, "head_dim": 32}
    llm = LLM(
        source(**shape),
        device="cuda",
        dtype=request.param,
        max_model_len=WIDTHS[256],
        max_num_seqs=NUM_SEQS,
        kv_cache_gib=0.25,
        speculative=DRAFT | {"model": source(**shape, num_hidden_layers=1)},
    )
    assert len(chain_of(llm).graphs) == len(CHAINS)
    return llm


CHAINS = chain_keys([4], graph_batches(NUM_SEQS))
CHAIN_LENGTHS = [
    *([LENGTH] * batch for batch in range(1, NUM_SEQS + 1)),
    [WIDTHS[256] - 5] * NUM_SEQS,
    [2] * 5,
    [16, 17, 15, 2, 200, 33, WIDTHS[256] - 5],
]


@pytest.mark.parametrize("options", SAMPLED.values(), ids=SAMPLED)
def test_chains_by_graph_give_the_bits_of_eager_ones(
    drafting: LLM, options: list[dict[str, Any]]
) -> None:
    chain = chain_of(drafting)
    caches: list[Any] = [layer.anabranch_cache for layer in chain.runner._layers]
    for lengths in CHAIN_LENGTHS:
        for drafts in ([4] * len(lengths), [1 + i % 4 for i in range(len(lengths))]):
            with started(drafting, lengths, drafts, options) as runs:
                found = chained(drafting, runs)
                kept = [(cache.k.clone(), cache.v.clone()) for cache in caches]
                with called_chains(chain, CHAINS):
                    assert chained(drafting, runs) == found
                for cache, (k, v) in zip(caches, kept, strict=True):
                    assert torch.equal(cache.k, k) and torch.equal(cache.v, v)


def test_chains_by_graph_give_the_tokens_of_a_pass_at_a_time(drafting: LLM) -> None:
    if drafting.engine.config.dtype != "float32":
        pytest.skip("in 16 bits, products of other shapes round differently")
    for lengths in CHAIN_LENGTHS:
        with started(drafting, lengths, [4] * len(lengths)) as runs:
            found = chained(drafting, runs)
            assert found == a_pass_at_a_time(drafting, runs, by_sampler(drafting, runs))


def test_inert_sequences_of_a_chain_keep_nothing(drafting: LLM) -> None:
    with started(drafting, [LENGTH] * 5, [4, 1, 2, 3, 4]) as runs:  # in a graph of eight
        assert_keeps_only_its_own(drafting, runs)


@pytest.mark.parametrize("options", SAMPLED.values(), ids=SAMPLED)
def test_all_drafts_come_from_graphs(
    options: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def eagerly(*_: Any) -> None:
        raise AssertionError("a chain was launched pass by pass")

    llm = tiny(**ON_GPU, max_num_seqs=8, speculative=DRAFT | {"adaptive": True})
    monkeypatch.setattr(chain_of(llm), "run", eagerly)
    params = [
        SamplingParams(max_tokens=20, seed=i, ignore_eos=True, **options[i % len(options)])
        for i, _ in enumerate(PROMPTS)
    ]
    outputs(llm, PROMPTS, params)
    assert llm.stats.speculative.num_draft_tokens > 0


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return one_by_one(tiny(**ON_GPU, cuda_graphs=False), PROMPTS)


@pytest.mark.parametrize("cuda_graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("name", SELECTED)
def test_tokens_are_the_same(name: str, cuda_graphs: bool, expected: list[list[int]]) -> None:
    llm = tiny(**ON_GPU | {"max_num_seqs": 8} | (ENGINES | HERE)[name], cuda_graphs=cuda_graphs)
    assert outputs(llm, PROMPTS) == expected
    assert outputs(llm, PROMPTS) == expected, "with the cache as the first round left it"
    assert (llm.stats.num_graph_steps > 0) == cuda_graphs
    assert (llm.stats.num_preemptions > 0) == ("preempted" in name)
    if "n-gram" in name or "draft" in name:
        assert llm.stats.speculative.num_accepted_tokens > 0


@pytest.mark.parametrize("name", ["batched", "n-gram", "draft", "n-gram tree"])
def test_prompts_as_long_as_a_verification(name: str) -> None:
    """A graph of five tokens a sequence fits a prompt of five as well."""
    prompts = random_prompts(7, (5, 5, 5, 4, 6, 1, 2))
    params = replace(GREEDY, prompt_logprobs=1)
    llm = tiny(**ON_GPU, max_num_seqs=8, **(ENGINES | HERE)[name])
    plain = tiny(**ON_GPU, max_num_seqs=8, cuda_graphs=False)
    assert one_by_one(llm, prompts) == one_by_one(plain, prompts)
    assert outputs(llm, prompts) == outputs(plain, prompts)
    assert outputs(llm, prompts, params) == outputs(plain, prompts, params)


def test_prompts_by_graph_give_the_tokens_of_eager_ones() -> None:
    prompts = [p for n in (33, 64, 65, 100, 129) for p in random_prompts(n, (n, n))[1:]]
    by_graph, eager = (tiny(**ON_GPU, cuda_graphs=graphs) for graphs in (True, False))
    for again in (False, True):  # the second time most of a prompt is in the cache
        for prompt in prompts:
            assert outputs(by_graph, [prompt]) == outputs(eager, [prompt])
        assert again or by_graph.stats.num_graph_steps == by_graph.stats.num_steps


def test_a_seed_reproduces() -> None:
    params = [
        SamplingParams(temperature=0.8, top_p=0.9, frequency_penalty=0.2, seed=i, max_tokens=20)
        for i, _ in enumerate(PROMPTS)
    ]
    alone = one_by_one(tiny(**ON_GPU, cuda_graphs=False), PROMPTS, params)
    for speculative in (None, NGRAM, NGRAM | TREE, DRAFT | TREE):
        llm = tiny(**ON_GPU, max_num_seqs=8, speculative=speculative)
        assert outputs(llm, PROMPTS, params) == alone


@contextmanager
def no_waiting(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Launches under torch's sync debug mode; counts of the copies to the host, a step each."""
    copies: list[int] = []
    launcher = llm.engine._launcher
    launch = launcher.launch
    count = 0

    def strict_launch(*args: Any) -> Any:
        nonlocal count
        count = 0
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            copies.append(count)

    download = batch_module.download

    def counted_download(*args: Any) -> Any:
        nonlocal count
        count += 1
        return download(*args)

    with monkeypatch.context() as patch:
        patch.setattr(launcher, "launch", strict_launch)
        patch.setattr(batch_module, "download", counted_download)
        patch.setattr(launch_module, "download", counted_download)
        yield copies


@pytest.mark.parametrize("cuda_graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize(
    "name", ["batched", "n-gram", "n-gram, expanded", "draft", "n-gram tree", "draft tree"]
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_launch_waits_for_nothing_and_copies_once(
    name: str, cuda_graphs: bool, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = tiny(**ON_GPU, max_num_seqs=8, **(ENGINES | HERE)[name], cuda_graphs=cuda_graphs)
    params = SamplingParams(
        temperature=temperature,
        seed=1,
        max_tokens=16,
        ignore_eos=True,
        logprobs=2,
        top_p=0.9,
        presence_penalty=0.1,
    )
    llm.generate(PROMPTS, params)  # compiles
    with no_waiting(llm, monkeypatch) as copies:
        llm.generate(PROMPTS, params)
    assert len(copies) > 3 and set(copies) == {1}


@pytest.mark.parametrize("name", ["batched", "n-gram", "draft", "n-gram tree"])
def test_the_device_sees_one_copy_to_the_host_a_step(name: str) -> None:
    llm = tiny(**ON_GPU, max_num_seqs=8, **(ENGINES | HERE)[name])
    outputs(llm, PROMPTS)
    before = llm.stats.num_steps
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        outputs(llm, PROMPTS)
        torch.cuda.synchronize()
    steps = llm.stats.num_steps - before
    copies = [event.name for event in profile.events() if event.name.startswith("Memcpy DtoH")]
    assert len(copies) == steps, (len(copies), steps)
    assert all("Pinned" in name for name in copies)


def test_chunks_without_samples_land() -> None:
    """A step that only computes a part of a prompt leaves nothing to wait for but its end."""
    llm = tiny(**ON_GPU, max_num_seqs=2, max_num_batched_tokens=16)
    prompt = [3 + i % 90 for i in range(230)]
    alone = tiny(**ON_GPU, max_num_seqs=2, cuda_graphs=False)
    assert outputs(llm, [prompt]) == outputs(alone, [prompt])
    assert all(taken > 0 for taken in llm.stats.stage_ms.values())
    assert llm.stats.num_prompt_tokens == 230


def test_memory_is_profiled_and_refused() -> None:
    llm = tiny(device="cuda", max_num_seqs=4, gpu_memory_utilization=0.5)
    assert llm.engine.pool.num_pages == 4 * 256 // 16, "as much as all sequences can use"
    with pytest.raises(ValueError, match="GiB"):
        tiny(device="cuda", gpu_memory_utilization=1e-4)
