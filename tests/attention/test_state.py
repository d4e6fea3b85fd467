"""The laws of the merge, and the reference against torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from states import double, random_state, stack, torch_merge
from tolerance import assert_state_close

from anabranch import AttentionState, DenseKV, PagedKV, RaggedKV, merge, reference
from anabranch.state import merge_stacked

FLOATS = [torch.float16, torch.bfloat16, torch.float32]
seeds = st.integers(0, 2**32 - 1)
shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


def merge64(*states: AttentionState) -> AttentionState:
    """The definition of the merge, in float64."""
    return merge_stacked(stack([double(state) for state in states]))


def assert_equal64(actual: AttentionState, expected: AttentionState) -> None:
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-13, atol=1e-13)


@given(shapes, seeds, st.integers(1, 20))
def test_merge_is_the_softmax_of_lses(shape: tuple[int, ...], seed: int, num_parts: int) -> None:
    parts = [random_state(shape, seed + i, dtype=torch.float64) for i in range(num_parts)]
    assert_equal64(merge64(*parts), torch_merge(stack(parts)))


@given(shapes, seeds)
def test_associative(shape: tuple[int, ...], seed: int) -> None:
    a, b, c = (random_state(shape, seed + i, dtype=torch.float64) for i in range(3))
    left, right = merge64(merge64(a, b), c), merge64(a, merge64(b, c))
    assert_equal64(left, right)
    assert_equal64(left, merge64(a, b, c))


@given(shapes, seeds, st.permutations(range(6)))
def test_commutative(shape: tuple[int, ...], seed: int, order: list[int]) -> None:
    parts = [random_state(shape, seed + i, dtype=torch.float64) for i in range(6)]
    assert_equal64(merge64(*(parts[i] for i in order)), merge64(*parts))


@given(shapes, seeds, st.sampled_from(FLOATS))
def test_two_states_commute_to_the_last_bit(
    shape: tuple[int, ...], seed: int, dtype: torch.dtype
) -> None:
    a, b = (random_state(shape, seed + i, dtype=dtype) for i in range(2))
    for mine, theirs in zip(merge(a, b), merge(b, a), strict=True):
        assert torch.equal(mine, theirs)


@given(shapes, seeds, st.sampled_from(FLOATS), st.integers(0, 2))
def test_empty_is_the_identity_to_the_last_bit(
    shape: tuple[int, ...], seed: int, dtype: torch.dtype, before: int
) -> None:
    state = random_state(shape, seed, dtype=dtype)
    empty = AttentionState.empty(shape, dtype=dtype)
    merged = merge(*[empty] * before, state, *[empty] * (2 - before))
    for mine, theirs in zip(merged, state, strict=True):
        assert torch.equal(mine, theirs)


@given(
    seeds,
    # So many that torch's largest error is that of many values: of 1 to 4 tokens, 5 of 6000
    # examples erred twice as much as torch, which had met no value that is hard to round.
    st.integers(30, 34),
    st.sampled_from([(1, 1), (4, 2), (6, 2), (5, 1)]),
    st.sampled_from([(1, 1), (8, 8), (40, 24)]),
    st.lists(st.integers(0, 30), min_size=1, max_size=7),
    st.sampled_from(FLOATS),
)
def test_slices_of_keys_merge_to_attention(
    seed: int,
    q_len: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    part_lens: list[int],
    dtype: torch.dtype,
) -> None:
    """Also when a slice has no keys, or all of them are masked."""
    rng = torch.Generator().manual_seed(seed)
    (num_heads, num_kv_heads), (dim_k, dim_v), k_len = heads, dims, sum(part_lens)
    q, k, v = (
        torch.randn(shape, generator=rng).to(dtype)
        for shape in (
            (q_len, num_heads, dim_k),
            (k_len, num_kv_heads, dim_k),
            (k_len, num_kv_heads, dim_v),
        )
    )
    mask = torch.rand(q_len, k_len, generator=rng) < 0.7
    expected = reference.attention(q, k, v, mask=mask)
    parts64 = [
        reference.attention(q, *slices[:2], mask=slices[2].T)
        for slices in zip(*(x.split(part_lens) for x in (k, v, mask.T)), strict=True)
    ]
    assert_equal64(merge64(*parts64), expected)
    parts = [AttentionState(part.out.to(dtype), part.lse.float()) for part in parts64]
    assert_state_close(merge(*parts), merge64(*parts), torch_merge(stack(parts)))


@given(seeds, st.integers(0, 12), st.sampled_from([None, 0.1]))
def test_a_sink_is_a_state(seed: int, k_len: int, scale: float | None) -> None:
    """A key with the sink's logit and a value of zero; alone it gives out 0 and its logit."""
    rng = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, 2, 4, generator=rng, dtype=torch.float64) for n in (3, k_len, k_len))
    sinks = torch.randn(2, generator=rng, dtype=torch.float64)
    state = reference.attention(q, k, v, scale=scale)
    merged = merge64(state, AttentionState.sink(sinks, state))
    assert_equal64(merged, reference.attention(q, k, v, scale=scale, sinks=sinks))

    scores = torch.einsum("qhd,khd->qhk", q, k) * (scale or 0.5)
    logits = torch.cat([scores, sinks.expand(3, 2)[..., None]], -1)
    values = torch.cat([v, torch.zeros(1, 2, 4)])
    by_hand = torch.einsum("qhk,khd->qhd", logits.softmax(-1), values)
    assert_equal64(merged, AttentionState(by_hand, logits.logsumexp(-1)))


def test_empty_states_merge_to_the_empty_state() -> None:
    empty = AttentionState.empty((3, 2, 5))
    merged = merge(empty, empty)
    assert (merged.lse == -torch.inf).all()
    assert not merged.out.count_nonzero()


def test_huge_lses_neither_overflow_nor_vanish() -> None:
    out = torch.tensor([[1.0], [3.0]])
    for level in (-1e30, -200.0, 200.0, 1e30):
        merged = merge(AttentionState(out, torch.full((2,), level)), dim=0)
        assert merged.out == 2.0
        assert merged.lse == torch.tensor(level) + torch.tensor(2.0).log()


def rows(*lines: str) -> torch.Tensor:
    """A mask drawn by hand: x attends."""
    return torch.tensor([[mark == "x" for mark in line] for line in lines])


def test_visible_by_hand() -> None:
    visible = reference.visible
    assert torch.equal(visible(2, 4, causal=False), rows("xxxx", "xxxx"))
    assert torch.equal(visible(2, 4, causal=True), rows("xxx.", "xxxx"))
    assert torch.equal(visible(1, 4, causal=True), rows("xxxx"))
    assert torch.equal(visible(3, 2, causal=True), rows("..", "x.", "xx"))
    assert torch.equal(visible(3, 5, causal=True, window=2), rows(".xx..", "..xx.", "...xx"))
    assert torch.equal(visible(2, 4, causal=False, window=2), rows(".xxx", "..xx"))
    assert visible(2, 0, causal=True).shape == (2, 0)


def test_visible_tree_by_hand() -> None:
    """Two drafts of one root: siblings do not see each other; all see the context."""
    tree = rows("x...", "xx..", "x.x.", "xx.x")
    drawn = rows("xxx...", "xxxx..", "xxx.x.", "xxxx.x")
    assert torch.equal(reference.visible(4, 6, causal=True, tree_mask=tree), drawn)
    narrow = reference.visible(4, 6, causal=True, tree_mask=tree[:, :2])
    assert torch.equal(narrow, rows("xxx...", "xxxx..", "xxx...", "xxxx.."))
    short = reference.visible(4, 2, causal=True, tree_mask=tree)
    assert torch.equal(short, rows("..", "..", "x.", ".x"))
    windowed = reference.visible(4, 6, causal=True, window=2, tree_mask=tree)
    assert torch.equal(windowed, rows(".xx...", "..xx..", "....x.", ".....x"))


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (5, 1)], ids=str)
@pytest.mark.parametrize("dims", [(8, 8), (24, 16)], ids=str)
@pytest.mark.parametrize("lens", [(7, 7), (3, 11), (1, 9)], ids=str)
@pytest.mark.parametrize("rule", ["all", "causal", "window"])
def test_reference_against_torch(
    heads: tuple[int, int], dims: tuple[int, int], lens: tuple[int, int], rule: str
) -> None:
    (num_heads, num_kv_heads), (dim_k, dim_v), (q_len, k_len) = heads, dims, lens
    q = torch.randn(q_len, num_heads, dim_k, dtype=torch.float64)
    k = torch.randn(k_len, num_kv_heads, dim_k, dtype=torch.float64)
    v = torch.randn(k_len, num_kv_heads, dim_v, dtype=torch.float64)
    band = torch.ones(q_len, k_len, dtype=torch.bool)
    if rule != "all":  # the last query sees the last key
        band = band.tril(k_len - q_len)
    if rule == "window":
        band = band.triu(k_len - q_len - 3)
    window = 4 if rule == "window" else None
    mask = reference.visible(q_len, k_len, causal=rule != "all", window=window)
    state = reference.attention(q, k, v, mask=mask)
    heads_first = [x.transpose(0, 1)[None] for x in (q, k, v)]
    by_torch = F.scaled_dot_product_attention(*heads_first, attn_mask=band, enable_gqa=True)
    scores = torch.matmul(
        heads_first[0][0], heads_first[1][0].repeat_interleave(num_heads // num_kv_heads, 0).mT
    )
    lse = torch.logsumexp((scores / dim_k**0.5).masked_fill(~band, -torch.inf), -1)
    assert_equal64(state, AttentionState(by_torch[0].transpose(0, 1), lse.T))


def test_reference_softcap_by_hand() -> None:
    q, k, v = (torch.randn(n, 1, 4, dtype=torch.float64) for n in (2, 5, 5))
    logits = 3.0 * torch.tanh(q[:, 0] @ k[:, 0].T * 0.7 / 3.0)
    state = reference.attention(q, k, v, scale=0.7, softcap=3.0)
    by_hand = AttentionState(logits.softmax(-1) @ v[:, 0], logits.logsumexp(-1))
    assert_equal64(state, AttentionState(by_hand.out[:, None], by_hand.lse[:, None]))


def test_reference_with_no_keys_is_empty() -> None:
    state = reference.attention(torch.randn(2, 3, 4), torch.randn(0, 1, 4), torch.randn(0, 1, 6))
    assert state.out.shape == (2, 3, 6)
    assert not state.out.count_nonzero()
    assert (state.lse == -torch.inf).all()


def test_reference_attend_agrees_over_key_sources() -> None:
    """The same keys dense, ragged and paged; a sequence without keys; a row of no sequence."""
    lens, page_size = [5, 0, 3], 2
    q = torch.randn(7, 4, 8)
    k, v = torch.randn(8, 2, 8), torch.randn(8, 2, 6)
    cu_seqlens_q = torch.tensor([0, 2, 3, 6], dtype=torch.int32)
    seq_lens = torch.tensor(lens, dtype=torch.int32)
    ragged = RaggedKV(k, v, torch.tensor([0, 5, 5, 8], dtype=torch.int32))

    dense_k, dense_v = torch.full((3, 5, 2, 8), torch.nan), torch.full((3, 5, 2, 6), torch.nan)
    paged_k, paged_v = torch.full((6, 2, 2, 8), torch.nan), torch.full((6, 2, 2, 6), torch.nan)
    table = torch.tensor([[4, 0, 2], [-1, -1, -1], [5, 1, -1]], dtype=torch.int32)
    for seq, (start, length) in enumerate(zip([0, 5, 5], lens, strict=True)):
        for row in range(length):
            for source, dense, paged in ((k, dense_k, paged_k), (v, dense_v, paged_v)):
                dense[seq, row] = source[start + row]
                paged[table[seq, row // page_size], row % page_size] = source[start + row]
    expected = reference.attend(q, ragged, cu_seqlens_q=cu_seqlens_q)
    first = reference.attention(q[:2], k[:5], v[:5], mask=reference.visible(2, 5, causal=True))
    assert_equal64(AttentionState(expected.out[:2], expected.lse[:2]), first)
    assert (expected.lse[[2, 6]] == -torch.inf).all()
    assert not expected.out[[2, 6]].count_nonzero()
    for keys in (
        DenseKV(dense_k, dense_v, seq_lens),
        PagedKV(paged_k, paged_v, table, seq_lens),
    ):
        assert_equal64(reference.attend(q, keys, cu_seqlens_q=cu_seqlens_q), expected)
