"""Sparse decoding in the engine: dense where all is kept, the selector's pages where not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from test_engine import NGRAM
from test_engine_cascade import draw
from test_engine_models import save
from test_step import ints, random_cache, random_tokens, run
from tiny_models import GREEDY, as_on_gpu, one_by_one, outputs, source, tiny
from tolerance import assert_close

from anabranch import attend, bound_pages, reference, select_pages, select_recent
from anabranch.llm.engine.config import EngineConfig
from anabranch.llm.engine.llm import LLM
from anabranch.llm.runner.sparse_decode import SparseConfig, SparseDecode
from anabranch.llm.runner.step import Entry, Step
from anabranch.llm.runner.step_layout import DecodeWay

# No prompt ends one token after a page: what is computed of it is never a step of one token.
PROMPTS = [draw(50 + i, size) for i, size in enumerate((100, 150, 3, 40, 200, 90))]
METHODS = ("pages", "recent")
every_method = pytest.mark.parametrize("method", METHODS)


@pytest.fixture(scope="module")
def dense() -> list[list[int]]:
    return outputs(tiny(), PROMPTS)


@every_method
def test_all_kept_is_dense(
    method: str, dense: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SparseDecode, "needed", lambda _, longest: longest > 0)
    llm = as_on_gpu(tiny(sparse={"method": method, "keep": 256}))
    assert outputs(llm, PROMPTS) == dense
    assert outputs(llm, PROMPTS) == dense, "with the cache as the first round left it"


def test_chunks_among_decodes_that_share_pages() -> None:
    """Decodes come first, whatever prefix a chunk of a few tokens has in common with them."""
    common, given = draw(7, 64), {"page_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 24}
    prompts = [common + draw(100 + i, 1 + 5 * i % 24) for i in range(20)]
    params = [replace(GREEDY, max_tokens=2 + 7 * i % 17) for i in range(20)]
    sparse = {"method": "pages", "keep": 32}
    found = list[list[list[int]]]()
    for cascade in (False, True):
        llm = tiny(sparse=sparse, cascade=cascade, **given)
        outputs(llm, [common + draw(9, 2)])  # the prefix is in the cache from here on
        found.append(outputs(llm, prompts, params))
    assert found[0] == found[1]


def test_short_contexts_are_read_whole(dense: list[list[int]]) -> None:
    observed: list[bool] = []
    llm = tiny(sparse={"keep": 224})

    def choose(*_: Any) -> Any:
        observed.append(True)

    sparse = llm.engine.choice.sparse
    assert sparse is not None
    sparse.choose = choose  # type: ignore[method-assign]
    assert outputs(llm, PROMPTS) == dense
    assert not observed


@every_method
def test_a_sequence_gets_the_same_pages_in_any_batch(method: str, dense: list[list[int]]) -> None:
    """Batched, beside prompts, by graphs, and with what an earlier round left in the cache."""
    options: Any = {"sparse": {"method": method, "keep": 48, "sinks": 16}}
    alone = one_by_one(tiny(**options), PROMPTS)
    assert alone != dense
    assert [a == b for a, b in zip(alone, dense, strict=True)][2]  # 27 tokens in all
    by_graphs = as_on_gpu(tiny(**options))
    for llm in (tiny(**options, max_num_seqs=3), by_graphs, by_graphs):
        assert outputs(llm, PROMPTS) == alone


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 2.0, 0.0])], ids=["", "sinks"])
@every_method
@torch.inference_mode()
def test_a_step_attends_to_what_the_selector_lists(method: str, sinks: torch.Tensor | None) -> None:
    """One token for each of two sequences; a layer with a window reads all of it."""
    torch.manual_seed(0)
    cache, tokens = random_cache(20), random_tokens(2)
    table = torch.randperm(20).view(2, 10).int()
    entry = Entry(slice(0, 2), ints(0, 1, 2), ints(39, 14), table, way=DecodeWay(selects=True))
    slots = torch.stack([table[0, 9] * 4 + 2, table[1, 3] * 4 + 1]).long()
    sparse = SparseDecode(SparseConfig(method=method, keep=16, sinks=4), [cache], 4)
    for seq, length in enumerate((38, 13)):  # bounds of what is there already
        places = torch.arange(length)
        sparse.observe(cache, table[seq].long()[places // 4] * 4 + places % 4)
    step = Step([entry], slots, sparse=sparse)
    found = run(step, tokens, cache, sinks=sinks)
    keys = cache.keys(table, entry.seq_lens)
    if method == "pages":
        listed = select_pages(tokens[0], keys, bound_pages(keys), num_pages=4)
    else:
        listed = select_recent(keys, sinks=4, recent=11)  # page 0, and pages 7 to 9 of 39 keys
    expected = attend(tokens[0], listed, sinks=sinks).out
    torch.testing.assert_close(found[0], expected[0])
    windowed = run(step, tokens, cache, window=20)
    exact = reference.attend(tokens[0], keys, cu_seqlens_q=ints(0, 1, 2), window=20).out
    assert_close(windowed, exact, windowed)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("quest", "method of sparse must be one of pages, recent, got 'quest'"),
        ({"keep": 0}, "keep of sparse must be at least 1, got 0"),
        ({"keep": 2.5}, "keep of sparse must be an integer, got 2.5"),
        ({"method": "recent", "keep": 64}, "sinks of sparse must be from 0 to .* 63, got 64"),
        ({"pages": 3}, "unknown options of sparse: pages"),
        (7, "sparse must be a method, its options or SparseConfig, got 7"),
    ],
)
def test_bad_options_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(sparse=given)


def test_options_come_in_several_forms() -> None:
    wanted = SparseConfig(method="recent", keep=512)
    for given in (wanted, {"method": "recent", "keep": 512}):
        assert EngineConfig(sparse=given).sparse == wanted  # type: ignore[arg-type]
    assert EngineConfig(sparse="pages").sparse == SparseConfig()  # type: ignore[arg-type]
    assert EngineConfig(sparse="off").sparse is None  # type: ignore[arg-type]


def test_drafts_and_small_pages_of_recent_keys_are_refused() -> None:
    with pytest.raises(ValueError, match="sparse='pages' and speculative='ngram'"):
        EngineConfig(sparse={"keep": 64}, speculative=NGRAM)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="keeps 1 pages of 16 keys, of which sinks 8"):
        tiny(sparse={"method": "recent", "keep": 16, "sinks": 8})


def test_caches_that_pages_cannot_be_chosen_from(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"bounds need plain keys.*got torch.int8"):
        tiny(sparse="pages", kv_cache_dtype="int8")
    save("deepseek-v2", tmp_path)
    with pytest.raises(ValueError, match="sparse='pages' needs keys apart from values"):
        LLM(str(tmp_path), device="cpu", sparse="pages")


def test_bounds_are_counted_as_cache() -> None:
    """A bound is a row of keys, two for every 16 rows of keys and 16 of values."""
    plain, sparse = (
        LLM(source(), device="cpu", kv_cache_gib=0.0002, sparse=each) for each in (None, "pages")
    )
    assert sparse.engine.limits.num_pages == plain.engine.limits.num_pages * 32 // 34


@pytest.mark.gpu
@every_method
def test_sparse_on_a_gpu(method: str) -> None:
    """Graphs give the tokens of eager steps, and all kept those of dense steps."""
    on_gpu = {"device": "cuda", "dtype": "float32", "kv_cache_gib": 0.01, "max_num_seqs": 8}
    options: Any = on_gpu | {"sparse": {"method": method, "keep": 48, "sinks": 16}}
    by_graphs, eager = tiny(**options), tiny(**options, cuda_graphs=False)
    assert outputs(by_graphs, PROMPTS) == outputs(eager, PROMPTS)
    assert by_graphs.stats.num_graph_steps > 0
    plain = tiny(**on_gpu)
    kept = tiny(**on_gpu, sparse={"method": method, "keep": 240})
    assert outputs(kept, PROMPTS) == outputs(plain, PROMPTS)
