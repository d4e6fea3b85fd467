"""Cascades by the property: states over shared and own pages, merged, equal the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import GPU, UNUSED_PAGE, Case, assert_right, every_producer, integers, starts
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch import (
    AttentionState,
    PagedKV,
    attend_cascade,
    make_cascade,
    make_draft_tree,
)

NUM_PAGES, SIZE = 60, 4
# Rows of pages: three levels over six sequences, a sequence alone, and an empty one.
ROWS = [
    [0, 1, 2, 3, 4, 10, 11],
    [0, 1, 2, 3, 4, 12],
    [0, 1, 2, 3, 13, 14],
    [0, 1, 5, 6, 15],
    [0, 1, 5, 6, 16],
    [0, 1, 17],
    [18, 19],
    [],
    [20, 21, 22, 23],
    [20, 21, 22, 24],
]


def make_keys(case: Case, rows: list[list[int]], lens: list[int]) -> PagedKV:
    """Pages of these rows, the last of them not full; poison elsewhere."""
    shape = (NUM_PAGES, SIZE, case.num_kv_heads)
    k, v = (torch.randn(*shape, dim).to(case.device, case.dtype) for dim in case.dims)
    held = torch.zeros(NUM_PAGES, SIZE, dtype=torch.bool)
    table = torch.full((len(rows), max(map(len, rows), default=0) + 1), UNUSED_PAGE)
    for seq, (row, length) in enumerate(zip(rows, lens, strict=True)):
        table[seq, : len(row)] = torch.tensor(row, dtype=torch.long)
        for place, page in enumerate(row):
            held[page, : max(min(length - place * SIZE, SIZE), 0)] = True
    for x in (k, v):
        x[~held] = torch.nan
    return PagedKV(k, v, table.int().to(case.device), integers(case, lens))


def make_queries(case: Case, q_lens: list[int]) -> tuple[torch.Tensor, dict[str, Any]]:
    num_tokens, num_heads = sum(q_lens), case.num_kv_heads * case.group
    q = torch.full((num_tokens + case.padding, num_heads, case.dims[0]), torch.nan)
    q[:num_tokens] = torch.randn(num_tokens, num_heads, case.dims[0])
    options = {"causal": True, "window": None, "softcap": None, "scale": 0.25, "sinks": None,
               "tree_mask": None, "cu_seqlens_q": starts(case, q_lens)}  # fmt: skip
    return q.to(case.device, case.dtype), options


def run(
    q: torch.Tensor, keys: PagedKV, options: dict[str, Any], impl: str | None, **given: Any
) -> AttentionState:
    tree = options["tree_mask"]
    given = {"min_saved_bytes": 0, **given}
    cascade = make_cascade(
        q, keys, cu_seqlens_q=options["cu_seqlens_q"], tree_mask=tree, impl=impl, **given
    )
    some = {name: options[name] for name in ("softcap", "scale", "sinks", "tree_mask")}
    return attend_cascade(q, keys, cascade, **some)


def spans_of(q: torch.Tensor, keys: PagedKV, impl: str, **given: Any) -> list[list[Any]]:
    """For each level, (first sequence, tokens, pages) of the spans that are shared."""
    pages = make_cascade(q, keys, impl=impl, **{"min_saved_bytes": 0, **given}).pages
    found, num_seqs = [], keys.num_seqs
    bounds = pages.cu_seqlens.tolist()
    for level in range(given["levels"]):
        first = level * (num_seqs + 1)
        found.append([
            (seq, bounds[first + seq + 1] - bounds[first + seq],
             pages.page_table[first + seq, : length // SIZE].tolist())
            for seq, length in enumerate(pages.seq_lens[first : first + num_seqs].tolist())
            if length
        ])  # fmt: skip
    return found


BASE = Case(dims=(16, 16), group=2, padding=0)
LENS = [4 * len(row) - (len(row) > 0) for row in ROWS]  # a page lacks one key


@every_producer
def test_levels_are_found(impl: str, device: str) -> None:
    case = replace(BASE, device=device)
    keys = make_keys(case, ROWS, LENS)
    q, _ = make_queries(case, [1] * len(ROWS))
    every = spans_of(q, keys, impl, levels=3, min_saved_keys=1)
    assert every == [
        [(0, 6, [0, 1]), (8, 2, [20, 21, 22])],
        [(0, 3, [2, 3]), (3, 2, [5, 6])],
        [(0, 2, [4])],
    ]
    # What does not pay is left to the level below: 6 sequences share 2 pages, 5 * 8 keys.
    some = spans_of(q, keys, impl, levels=2, min_saved_keys=41)
    assert some == [[], []]
    assert spans_of(q, keys, impl, levels=1, min_saved_keys=40) == [[(0, 6, [0, 1])]]
    some = spans_of(q[:3], replace(keys, page_table=keys.page_table[1:4],
                                   seq_lens=keys.seq_lens[1:4]), impl,
                    levels=2, min_saved_keys=16)  # fmt: skip
    assert some == [[(0, 3, [0, 1])], []]
    # One page for three sequences does not pay, four pages for two of them do, from the first on.
    rows = [[0, 1, 2, 3, 30], [0, 1, 2, 3, 31], [0, 32]]
    keys = make_keys(case, rows, [19, 19, 7])
    for least in (10, 13, 16):  # all four pages count, not those after the first level alone
        found = spans_of(q[:3], keys, impl, levels=2, min_saved_keys=least)
        assert found == [[], [(0, 2, [0, 1, 2, 3])]]
    assert spans_of(q[:3], keys, impl, levels=2, min_saved_keys=17) == [[], []]


@every_producer
def test_little_is_not_shared(impl: str, device: str) -> None:
    """The rows have 20 pages of 4 keys in common, and a key has 2 heads of 2 * 16 columns."""
    case, saved = replace(BASE, device=device), 20 * 4 * 2 * 2 * 16 * 4
    keys = make_keys(case, ROWS, LENS)
    q, options = make_queries(case, [1] * len(ROWS))
    given = {"levels": 1, "min_saved_keys": 1}
    enough = spans_of(q, keys, impl, **given, min_saved_bytes=saved)
    assert enough == [[(0, 6, [0, 1]), (8, 2, [20, 21, 22])]]
    assert spans_of(q, keys, impl, **given, min_saved_bytes=saved + 1) == [[]]
    assert_right(run(q, keys, options, impl, min_saved_bytes=saved + 1), q, keys, options)


def test_bytes_count_scales() -> None:
    """Codes of 8 bits, with a scale of 32 bits for each head of a key."""
    codes, scales = torch.zeros(2, 4, 2, 16, dtype=torch.int8), torch.ones(2, 4, 2)
    case = replace(BASE, dims=(16, 16))
    table, lens = integers(case, [[0, 1], [0, 1]]), integers(case, [5, 6])
    keys = PagedKV(codes, codes, table, lens, scales, scales, torch.float32)
    q, _ = make_queries(case, [1, 1])
    saved = 4 * 2 * 2 * (16 + 4)
    for limit, length in ((saved, 4), (saved + 1, 0)):
        cascade = make_cascade(q, keys, levels=1, min_saved_keys=1, min_saved_bytes=limit)
        assert cascade.pages.seq_lens.tolist() == [length, 0, 0]


@every_producer
@pytest.mark.parametrize(("q_len", "levels"), [(1, 1), (1, 2), (3, 3)])
def test_merged(q_len: int, levels: int, impl: str, device: str) -> None:
    case = replace(BASE, device=device, padding=2)
    keys = make_keys(case, ROWS, LENS)
    q, options = make_queries(case, [q_len] * len(ROWS))
    state = run(q, keys, options, impl, levels=levels, min_saved_keys=1)
    assert_right(state, q, keys, options)


@every_producer
def test_options(impl: str, device: str) -> None:
    case = replace(BASE, device=device)
    keys = make_keys(case, ROWS, LENS)
    q, options = make_queries(case, [1] * len(ROWS))
    options |= {"softcap": 5.0, "sinks": torch.randn(4, device=device)}
    assert_right(run(q, keys, options, impl, min_saved_keys=1), q, keys, options)


@every_producer
def test_trees_over_shared_pages(impl: str, device: str) -> None:
    """Only what lies before the queries is shared."""
    case = replace(BASE, device=device)
    keys = make_keys(case, ROWS, LENS)
    q_lens = [3, 3, 5, 1, 0, 2, 7, 0, 5, 5]
    q, options = make_queries(case, q_lens)
    parents = [max(node - 2, -1) for size in q_lens for node in range(size)]
    tree = make_draft_tree(integers(case, parents), cu_seqlens_q=options["cu_seqlens_q"], impl=impl)
    options["tree_mask"] = tree.tree_mask
    assert_right(run(q, keys, options, impl, min_saved_keys=1), q, keys, options)


@every_producer
def test_sequences_apart_in_the_batch(impl: str, device: str) -> None:
    """Brought side by side, and their states brought back."""
    case = replace(BASE, device=device)
    shuffled = [3, 8, 0, 6, 5, 9, 2, 7, 4, 1]
    keys = make_keys(case, [ROWS[seq] for seq in shuffled], [LENS[seq] for seq in shuffled])
    q, options = make_queries(case, [1] * len(ROWS))
    least = {"min_saved_keys": 1, "min_saved_bytes": 0}
    cascade = make_cascade(q, keys, levels=3, **least, reorder=True, impl=impl)
    assert [shuffled[seq] for seq in cascade.order.tolist()] == [3, 4, 0, 1, 2, 5, 8, 9, 6, 7]
    lengths = cascade.pages.seq_lens.view(3, -1).sum(1).tolist()
    assert lengths == [8 + 12, 8 + 8, 4]  # as in test_levels_are_found
    out = AttentionState.empty(tuple(q.shape), device=device)
    for given_out in (None, out):
        state = attend_cascade(q, keys, cascade, scale=options["scale"], out=given_out)
        assert_right(state, q, keys, options)


@every_producer
def test_nothing_is_shared(impl: str, device: str) -> None:
    case = replace(BASE, device=device)
    for rows, lens in (([[1, 2], [3, 4], [5]], [8, 7, 1]), ([[], []], [0, 0]), ([[7, 8]], [8])):
        keys = make_keys(case, rows, lens)
        q, options = make_queries(case, [1] * len(rows))
        assert_right(run(q, keys, options, impl, min_saved_keys=1), q, keys, options)
        found = spans_of(q, keys, impl, levels=2, min_saved_keys=1)
        assert found == [[], []]


@every_producer
def test_into_given_buffers_without_starts(impl: str, device: str) -> None:
    case = replace(BASE, device=device)
    keys = make_keys(case, ROWS, LENS)
    q, options = make_queries(case, [1] * len(ROWS))
    out = AttentionState.empty(tuple(q.shape), device=device)
    cascade = make_cascade(q, keys, min_saved_keys=1, min_saved_bytes=0, impl=impl)
    state = attend_cascade(q, keys, cascade, scale=options["scale"], out=out)
    assert state is out
    assert_right(state, q, keys, options)


@st.composite
def prefix_trees(draw: Any) -> tuple[list[list[int]], list[int], list[int]]:
    """Rows that branch up to three times, of sequences side by side; lengths and query lengths."""
    fresh = iter(range(NUM_PAGES))
    rows: list[list[int]] = []

    def branch(prefix: list[int], level: int) -> None:
        own = [next(fresh) for _ in range(draw(st.integers(0, 2)))]
        if not level or draw(st.booleans()):
            rows.append([*prefix, *own])
            return
        for _ in range(draw(st.integers(1, 2))):
            branch([*prefix, *own], level - 1)

    for _ in range(draw(st.integers(1, 2))):
        branch([], 3)
    lens = [max(len(row) * SIZE - draw(st.integers(0, 3)), 0) for row in rows]
    q_lens = [draw(st.integers(0, 3)) for _ in rows]
    return rows, lens, q_lens


@pytest.mark.parametrize("impl", ["torch", "triton"])
@settings(max_examples=8)
@given(prefix_trees(), st.integers(1, 4), st.integers(1, 40))
def test_any_tables(
    impl: str, drawn: tuple[list[list[int]], list[int], list[int]], levels: int, least: int
) -> None:
    if torch.cuda.is_available():
        pytest.skip("in the interpreter")
    rows, lens, q_lens = drawn
    case = replace(BASE, padding=1)
    keys = make_keys(case, rows, lens)
    q, options = make_queries(case, q_lens)
    state = run(q, keys, options, impl, levels=levels, min_saved_keys=least)
    assert_right(state, q, keys, options)


def test_refusals() -> None:
    keys = make_keys(BASE, ROWS, LENS)
    q, _ = make_queries(BASE, [1] * len(ROWS))
    for message, bad in (
        ("levels must be 1 to 7, got 0", {"levels": 0}),
        ("levels must be 1 to 7, got 8", {"levels": 8}),
        ("min_saved_keys must be at least 1, got 0", {"min_saved_keys": 0}),
        ("min_saved_bytes must be 0 or more, got -1", {"min_saved_bytes": -1}),
        ("impl must be one of torch, triton, got 'cuda'", {"impl": "cuda"}),
    ):
        with pytest.raises(ValueError, match=message):
            make_cascade(q, keys, **bad)
    bounds = starts(BASE, [1] * len(ROWS))
    with pytest.raises(ValueError, match="reorder is for one token a sequence"):
        make_cascade(q, keys, cu_seqlens_q=bounds, reorder=True)
    with pytest.raises(ValueError, match="q must be packed"):
        make_cascade(q[:, None], keys)
    cascade = make_cascade(q, keys)
    with pytest.raises(ValueError, match="the plan was made for num_tokens = 20, got 18"):
        attend_cascade(q[1:], keys, cascade)


@GPU
def test_replayed_with_other_prefixes() -> None:
    """Groups, lengths and the decision whether sharing pays are those of the replay."""
    case = replace(BASE, dims=(128, 128), dtype=torch.bfloat16, group=4, device="cuda")
    wide = make_keys(case, ROWS, LENS)
    q, options = make_queries(case, [1] * len(ROWS))
    held = replace(wide, page_table=wide.page_table.clone(), seq_lens=wide.seq_lens.clone())
    held.k.nan_to_num_()
    held.v.nan_to_num_()
    run(q, held, options, None, levels=3, min_saved_keys=8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        state = run(q, held, options, None, levels=3, min_saved_keys=8)
    other = [[30 + seq, 40, 41][: seq % 4] for seq in range(10)]
    same = [[0, 1, 2, 3, 50 + seq] for seq in range(10)]
    for rows in (ROWS, other, same):
        lens = [max(4 * len(row) - 1, 0) for row in rows]
        table = torch.full_like(held.page_table, UNUSED_PAGE)
        for seq, row in enumerate(rows):
            table[seq, : len(row)] = integers(case, row)
        held.page_table.copy_(table)
        held.seq_lens.copy_(integers(case, lens))
        q.copy_(torch.randn_like(q))
        graph.replay()
        assert_right(state, q, held, options)


@GPU
def test_many_sequences() -> None:
    """More than one chunk of neighbours, and prefixes of more than one chunk of pages."""
    num_seqs, shared, size = 300, 300, 4
    case = Case(dims=(64, 64), dtype=torch.bfloat16, group=4, padding=0, device="cuda")
    q, options = make_queries(case, [1] * num_seqs)
    k, v = torch.randn(2, shared + num_seqs, size, 2, 64, device="cuda", dtype=torch.bfloat16)
    table = torch.arange(shared, device="cuda").repeat(num_seqs, 1)
    table[150:, 100:280] = table[150:, 100:280].flip(1)
    own = shared + torch.arange(num_seqs, device="cuda")[:, None]
    lens = integers(case, [(shared + 1) * size - 3] * num_seqs)
    keys = PagedKV(k, v, torch.cat([table, own], 1).int(), lens)
    cascade = make_cascade(q, keys, levels=2, min_saved_bytes=0)
    lengths = cascade.pages.seq_lens.view(2, num_seqs + 1)
    assert lengths[0].nonzero().flatten().tolist() == [0]
    assert lengths[0, 0] == 400
    assert lengths[1].nonzero().flatten().tolist() == [0, 150]
    assert lengths[1, [0, 150]].tolist() == [800, 800]
    state = attend_cascade(q, keys, cascade, scale=options["scale"])
    assert_right(state, q, keys, options)
