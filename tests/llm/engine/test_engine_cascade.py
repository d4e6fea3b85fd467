"""Shared prefixes in the engine: found by themselves, in levels, and tokens do not change."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from test_engine import NGRAM
from test_engine_models import save
from tiny_models import VOCAB, as_on_gpu, outputs, pages, source, tiny

from anabranch.llm.engine.attention_ways import shared_prefixes
from anabranch.llm.engine.config import EngineConfig
from anabranch.llm.engine.limits import Limits
from anabranch.llm.engine.llm import LLM
from anabranch.llm.runner import step as step_module
from anabranch.llm.runner.graphs import GraphKey
from anabranch.llm.runner.kv_cache import LayerShape
from anabranch.llm.runner.shared_prefixes import LEVELS, SharedPrefixes, saved_pages
from anabranch.llm.runner.step_layout import DecodeWay
from anabranch.llm.sampling.params import SamplingParams
from anabranch.llm.sequences.page_pool import PagePool, SequencePages
from anabranch.llm.sequences.sequence import Scheduled, Sequence

PAGE = 4


def draw(seed: int, size: int) -> list[int]:
    return torch.randint(2, VOCAB, (size,), generator=torch.Generator().manual_seed(seed)).tolist()


# A prompt of all, documents of four each, conversations of two each, and the rest of each; the
# order brings no two of a conversation together.
LEVELLED = [
    draw(0, 40) + draw(1 + i % 2, 24) + draw(10 + i % 4, 20) + draw(20 + i, 3 + i) for i in range(8)
]
ALONE = [draw(100 + i, 30 + i) for i in range(4)]


@pytest.fixture
def cascades(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Levels and shared keys of every layer that was attended to as a cascade."""
    seen: list[tuple[int, int]] = []
    attend_cascade = step_module.attend_cascade

    def observed(q: torch.Tensor, keys: Any, cascade: Any, **options: Any) -> Any:
        seen.append((cascade.levels, int(cascade.pages.seq_lens.sum())))
        return attend_cascade(q, keys, cascade, **options)

    monkeypatch.setattr(step_module, "attend_cascade", observed)
    return seen


ENGINES: dict[str, dict[str, Any]] = {
    "batched": {"page_size": PAGE},
    "chunked": {"page_size": PAGE, "max_num_batched_tokens": 30, "max_num_seqs": 10},
    "preempted": {"page_size": PAGE, "kv_cache_gib": pages(75) / 4, "max_model_len": 130},
    "n-gram": {"page_size": PAGE, "speculative": NGRAM},
    "n-gram, expanded": {"page_size": 8, "speculative": NGRAM | {"scorer": "batch-expansion"}},
}


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return outputs(tiny(), LEVELLED + ALONE)


@pytest.mark.parametrize("like_gpu", [False, True], ids=["in turn", "in flight, by graphs"])
@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_tokens_are_the_same(
    options: dict[str, Any], like_gpu: bool, expected: list[list[int]], cascades: list[Any]
) -> None:
    llm = tiny(**options, cascade=True)
    if like_gpu:
        as_on_gpu(llm)
    assert outputs(llm, LEVELLED + ALONE) == expected
    assert outputs(llm, LEVELLED + ALONE) == expected, "with the cache as the first round left it"
    assert max(levels for levels, _ in cascades) == LEVELS[-1]
    assert (llm.stats.num_preemptions > 0) == ("kv_cache_gib" in options)


def test_all_levels_are_shared(cascades: list[tuple[int, int]]) -> None:
    llm = tiny(page_size=PAGE, cascade=True)
    outputs(llm, LEVELLED)
    cascades.clear()
    outputs(llm, LEVELLED)  # everything is in the cache, so all decode together
    assert max(cascades) == (3, 40 + 2 * 24 + 4 * 20)


@pytest.mark.parametrize("like_gpu", [False, True], ids=["in turn", "in flight, by graphs"])
def test_samples_of_a_prompt_share_it(cascades: list[tuple[int, int]], like_gpu: bool) -> None:
    """The prompt is computed once, and read once by all n."""
    prompt, model = draw(5, 300), source(max_position_embeddings=512)
    params = SamplingParams(temperature=1.0, n=5, seed=7, max_tokens=12, ignore_eos=True)
    flat, shared = (LLM(model, device="cpu", cascade=on) for on in (False, True))
    if like_gpu:
        as_on_gpu(shared)
    found = [[out.token_ids for out in llm.generate([prompt], params)[0].outputs]
             for llm in (flat, shared)]  # fmt: skip
    assert found[0] == found[1]
    assert shared.stats.num_prompt_tokens == 300 + 4 * (300 % 16 or 16)
    assert set(cascades) == {(1, 300 // 16 * 16)}


def test_sequences_that_share_nothing_are_attended_to_apart(cascades: list[Any]) -> None:
    llm = as_on_gpu(tiny(cascade=True))
    outputs(llm, ALONE)
    assert not cascades


SHARING_LAYERS = {"gemma2": 1, "gpt-oss": 1, "mistral": 0, "deepseek-v2": 2}


@pytest.mark.parametrize("name", SHARING_LAYERS)
def test_layers_with_a_window_share_nothing(
    name: str, tmp_path: Path, cascades: list[tuple[int, int]]
) -> None:
    """Softcap and sinks are kept; one layer of two has a window, both have, or none."""
    save(name, tmp_path)
    flat, shared = (
        LLM(str(tmp_path), device="cpu", page_size=PAGE, cascade=on) for on in (False, True)
    )
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for _ in range(2):
        cascades.clear()
        assert outputs(shared, LEVELLED, params) == outputs(flat, LEVELLED, params)
    assert len(cascades) == 8 * SHARING_LAYERS[name]


@pytest.mark.parametrize("options", [{"kv_cache_dtype": "q8_0"}, {"tensor_parallel": 2}], ids=str)
def test_quantised_pages_and_pages_of_several_ranks_are_shared(
    options: dict[str, Any], cascades: list[Any]
) -> None:
    given: dict[str, Any] = {"device": "cpu", "page_size": PAGE}
    formats = {"kv_cache_dtype": options.get("kv_cache_dtype", "auto")}
    flat = LLM(source(head_dim=32), **given, **formats, cascade=False)
    expected = outputs(flat, LEVELLED)
    shared = LLM(source(head_dim=32), **given, **options, cascade=True)
    try:
        for _ in range(2):  # the second time all pages are in the cache
            assert outputs(shared, LEVELLED) == expected
    finally:
        shared.close()
    assert cascades


def test_off_is_off(cascades: list[Any]) -> None:
    for options in ({}, {"cascade": False}):  # on a CPU off unless it is asked for
        llm = tiny(page_size=PAGE, **options)
        assert llm.engine.choice.prefixes is None
        outputs(llm, LEVELLED)
    assert not cascades


def test_by_default_a_gpu_shares_where_that_can_pay() -> None:
    def built(device: str, max_model_len: int = 8192, latent: bool = False, **given: Any) -> bool:
        limits = Limits(max_model_len, 64, 64, 16, 1000, 0)
        large = LayerShape(1 if latent else 8, 128, 128, torch.float16, is_latent=latent)
        layers = {0: LayerShape(1, 8, 8, torch.float16), 1: large}  # the largest counts
        found = shared_prefixes(EngineConfig(**given), limits, layers, torch.device(device))
        return found is not None

    assert built("cuda") and not built("cpu")
    assert not built("cuda", cascade=False) and not built("cuda", prefix_caching=False)
    assert not built("cuda", max_model_len=512)  # 132 MB at most
    assert not built("cuda", latent=True, max_model_len=100_000)
    assert built("cuda", latent=True, cascade=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cascade": "yes"}, "cascade must be True, False or None, got 'yes'"),
        ({"cascade": True, "prefix_caching": False}, "cascade=True needs prefix_caching=True"),
        ({"cascade": True, "context_parallel": 2}, "cascade=True .* got context_parallel=2"),
        ({"sparse": "pages", "context_parallel": 2}, "sparse .* got context_parallel=2"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**options)


def runs(*page_lists: list[int], num_tokens: int = 1) -> list[Scheduled]:
    found: list[Scheduled] = []
    for i, listed in enumerate(page_lists):
        held = SequencePages(PagePool(1), PAGE)
        held.pages = listed
        seq = Sequence(f"{i}", 0, SamplingParams(), 1, [1], held, 0, 8)
        found.append(Scheduled(seq, PAGE * len(listed) - num_tokens, num_tokens))
    return found


def test_sharers_are_neighbours_and_prompts_stay_last() -> None:
    prefixes = SharedPrefixes(page_size=PAGE, token_bytes=1, always=True)
    step = runs([1, 2, 9], [5, 6], [1, 2, 8], [5, 7], [1, 3])
    prompt = runs([1, 2, 4, *range(20, 40)], num_tokens=60)
    ordered = prefixes.order(step + prompt)
    assert [step.index(run) if run in step else "prompt" for run in ordered] == [
        *(2, 0, 4, 1, 3),
        "prompt",
    ]
    assert prefixes.levels(step) == 3
    apart = runs([1], [2], [3])
    assert prefixes.order(apart) == apart and prefixes.levels(apart) == 0


def test_levels_are_chosen_by_what_they_save() -> None:
    """6 KiB a token: 192 MiB are 8192 pages of four tokens."""
    prefixes = SharedPrefixes(page_size=PAGE, token_bytes=6 << 10)
    common, branches = list(range(5000)), [list(range(n, n + 9000)) for n in (10_000, 20_000)]
    pair = runs([*common, -1], [*common, -2])
    assert prefixes.levels(pair) == 0  # saves 5000
    assert prefixes.levels(runs(*([*common, -i] for i in range(3)))) == 1  # saves 10000
    twice = runs(*([*common, *branches[i % 2], -i] for i in range(4)))
    assert prefixes.levels(twice) == 3  # and 2 * 9000 below that
    prefixes.enabled = False
    assert prefixes.levels(twice) == 0


def test_a_readmitted_sequence_is_looked_at_again() -> None:
    prefixes = SharedPrefixes(page_size=PAGE, token_bytes=1, always=True)
    step = runs([1, 2], [1, 3])
    assert prefixes.levels(step) == 1
    step[1].seq.pages.pages, step[1].seq.num_preemptions = [7, 8], 1
    assert prefixes.levels(step) == 0


def test_saved_pages_are_those_read_more_than_once() -> None:
    draws = torch.Generator().manual_seed(0)
    for _ in range(20):
        rows = torch.randint(0, 2, (6, 5), generator=draws).tolist()
        rows.sort()
        common = [0]
        for a, b in pairwise(rows):
            common.append(next((i for i in range(5) if a[i] != b[i]), 5))
        prefixes = {tuple(row[: i + 1]) for row in rows for i in range(5)}
        assert saved_pages(common, 9) == 6 * 5 - len(prefixes)
        assert saved_pages(common, 1) <= saved_pages(common, 2) <= saved_pages(common, 9)


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("name", ["batched", "chunked", "preempted", "n-gram"])
def test_tokens_are_the_same_on_a_gpu(name: str, cuda_graphs: bool) -> None:
    on_gpu = {"device": "cuda", "dtype": "float32", "kv_cache_gib": 0.01, "max_num_seqs": 8}
    flat = tiny(**on_gpu, page_size=PAGE, cascade=False)
    shared = tiny(**on_gpu | ENGINES[name] | {"cascade": True, "cuda_graphs": cuda_graphs})
    if cuda_graphs:
        assert GraphKey(1, 8, DecodeWay(LEVELS[-1])) in shared.engine._launcher._built.runner.graphs
    for _ in range(2):
        assert outputs(shared, LEVELLED + ALONE) == outputs(flat, LEVELLED + ALONE)
    assert (shared.stats.num_graph_steps > 0) == cuda_graphs


@pytest.mark.gpu
def test_samples_of_a_prompt_share_it_on_a_gpu() -> None:
    model = source(max_position_embeddings=2048, hidden_size=128, head_dim=32)
    options: Any = {"device": "cuda", "dtype": "float32", "kv_cache_gib": 0.1, "max_num_seqs": 16}
    prompt, params = draw(5, 1500), SamplingParams(temperature=1.0, n=16, seed=7, max_tokens=24)
    found = [
        [
            out.token_ids
            for out in LLM(model, **options, cascade=on).generate([prompt], params)[0].outputs
        ]
        for on in (False, True)
    ]
    assert found[0] == found[1]
