"""The CPU path by one property: its states equal the reference, whatever lies in unused memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import (
    DIMS,
    DTYPES,
    SOURCES,
    Case,
    assert_right,
    make_call,
    make_inputs,
    torch_attention,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import assert_state_close
from torch.utils._python_dispatch import TorchDispatchMode

import anabranch
from anabranch import reference
from anabranch.kernels.cpu import attend as attend_module
from anabranch.kernels.cpu import flash as flash_module
from anabranch.kernels.cpu.masks import BLOCK_M, Visibility
from anabranch.kernels.cpu.native import native
from anabranch.keys import DenseKV, KeySource, RaggedKV
from anabranch.state import AttentionState, merge_stacked

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def attend(q: torch.Tensor, keys: KeySource, **options: Any) -> AttentionState:
    """As the producer runs it, also by rules that attend() refuses."""
    layout, room = attend_module.NoLayout(), torch.empty(0, dtype=torch.uint8)
    return attend_module.attend(make_call(q, keys, options), layout, room, None)


def check(case: Case, seed: int = 0) -> None:
    q, keys, options = make_inputs(case, seed)
    assert_right(attend(q, keys, **options), q, keys, options)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("dims", "group"), [*zip(DIMS, (1, 3, 4, 7), strict=True)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sources(source: str, dims: tuple[int, int], group: int, dtype: torch.dtype) -> None:
    check(Case(source=source, dims=dims, group=group, dtype=dtype))


def spread(x: torch.Tensor) -> torch.Tensor:
    """A copy whose last dimension is not contiguous, with NaN between."""
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan, dtype=x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("dims", [(64, 64), (64, 32)])
@pytest.mark.parametrize("strided", ["q", "k", "v"])
def test_strided_heads(source: str, dims: tuple[int, int], strided: str) -> None:
    for q_lens in ((1, 1, 1), (3, 40, 1)):
        case = Case(source=source, dims=dims, q_lens=q_lens, k_lens=(70, 80, 33))
        q, keys, options = make_inputs(case, 0)
        if strided == "q":
            state = attend(spread(q), keys, **options)
        else:
            other = replace(keys, **{strided: spread(getattr(keys, strided))})
            state = attend(q, other, **options)
        assert_right(state, q, keys, options)


@pytest.mark.parametrize("page_size", [1, 8, 16, 64, 256])
@pytest.mark.parametrize("source", SOURCES[2:])
def test_page_sizes(source: str, page_size: int) -> None:
    check(Case(source=source, page_size=page_size, k_lens=(5, 63, 65, 257, 16)))


@pytest.mark.parametrize("dims", [(64, 64), (128, 64)])
@pytest.mark.parametrize(
    "options",
    [
        {"causal": False},
        {"window": 1},
        {"window": 20, "sinks": True},
        {"window": 20, "causal": False},
        {"softcap": 5.0, "sinks": True},
        {"softcap": 5.0, "window": 20},
        {"tree_width": 17},
        {"tree_width": 3, "window": 20, "sinks": True},
        {"tree_width": 64, "softcap": 5.0, "causal": False},
    ],
    ids=str,
)
def test_options(options: dict[str, object], dims: tuple[int, int]) -> None:
    for source in SOURCES[:3]:
        check(Case(source=source, dims=dims, **options))


@pytest.mark.parametrize(
    "lengths",
    [
        {"q_lens": (1,) * 6, "k_lens": (90, 95, 100, 90, 64, 1)},
        {"q_lens": (1,) * 4, "k_lens": (90, 0, 90, 90)},
        {"q_lens": (1, 0, 1), "k_lens": (90, 90, 90)},
        {"q_lens": (5,) * 4, "k_lens": (40, 45, 5, 4)},
        {"q_lens": (30,) * 3, "k_lens": (30,) * 3},
        {"q_lens": (30,), "k_lens": (29,)},
        {"q_lens": (0,), "k_lens": (7,)},
        {"q_lens": (3, 2), "k_lens": (0, 0)},
    ],
    ids=str,
)
@pytest.mark.parametrize("options", [{}, {"window": 50, "sinks": True}, {"tree_width": 4}], ids=str)
def test_batches(lengths: dict[str, tuple[int, ...]], options: dict[str, object]) -> None:
    for source in SOURCES:
        check(Case(source=source, padding=0, **lengths, **options))
        check(Case(source=source, dtype=torch.bfloat16, **lengths, **options))


@pytest.mark.parametrize("source", ["dense", "paged"])
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 100}, {"window": 100, "causal": False}, {"softcap": 5.0}, {"tree_width": 300}],
    ids=str,
)
def test_beyond_one_tile(source: str, options: dict[str, object]) -> None:
    lengths = {"q_lens": (BLOCK_M + 1, 1), "k_lens": (BLOCK_M + 400, 513)}
    check(Case(source=source, page_size=16, group=2, dims=(40, 40), **lengths, **options))


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("group", [1, 3])
def test_keys_cut_into_parts(
    source: str, dtype: torch.dtype, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attend_module, "MAX_COPIED_BYTES", 1 << 17)
    monkeypatch.setattr(flash_module, "MIN_BYTES_TO_SPLIT", 1 << 14)
    monkeypatch.setattr(flash_module, "SPLIT_KEYS", 64)
    for q_len in (1, 3):
        lengths = {"q_lens": (q_len,) * 2, "k_lens": (700, 690)}
        check(Case(source=source, dtype=dtype, group=group, **lengths))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(64, 64), (192, 128)])
@pytest.mark.parametrize("q_len", [1, 4, 300])
def test_no_less_accurate_than_torch(dtype: torch.dtype, dims: tuple[int, int], q_len: int) -> None:
    lengths = {"q_lens": (q_len,) * 3, "k_lens": (700, 690, 1000)}
    q, keys, options = make_inputs(Case(dtype=dtype, dims=dims, padding=0, **lengths), seed=0)
    expected = reference.attend(q, keys, **options)
    assert_state_close(attend(q, keys, **options), expected, torch_attention(q, keys, options))


def test_sums_over_large_heads_are_no_less_accurate_than_torchs() -> None:
    """Large scores, whose errors are errors of weights."""
    lengths = {"q_lens": (300,) * 3, "k_lens": (700, 690, 1000)}
    q, keys, options = make_inputs(Case(dims=(256, 256), padding=0, scale=1.0, **lengths), seed=3)
    expected = reference.attend(q, keys, **options)
    assert_state_close(attend(q, keys, **options), expected, torch_attention(q, keys, options))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_seqs = draw(st.integers(1, 4))
    q_len = st.sampled_from([0, 1, 1, 3, 17, 60])
    k_len = st.sampled_from([0, 1, 15, 16, 17, 63, 64, 65, 130])
    q_lens = draw(st.lists(q_len, min_size=num_seqs, max_size=num_seqs))
    if draw(st.booleans()):
        q_lens = q_lens[:1] * num_seqs
    k_lens = draw(st.lists(k_len, min_size=num_seqs, max_size=num_seqs))
    return Case(
        q_lens=tuple(q_lens),
        k_lens=tuple(k_lens),
        source=draw(st.sampled_from(SOURCES)),
        page_size=draw(st.sampled_from([1, 8, 16, 64])),
        num_kv_heads=draw(st.integers(1, 3)),
        group=draw(st.sampled_from([1, 3, 4, 7])),
        dims=draw(st.sampled_from([*DIMS, (40, 64)])),
        dtype=draw(st.sampled_from(DTYPES)),
        causal=draw(st.booleans()),
        window=draw(st.sampled_from([None, None, 1, 16, 64])),
        softcap=draw(st.sampled_from([None, None, 5.0])),
        sinks=draw(st.booleans()),
        tree_width=draw(st.sampled_from([None, None, 1, 3, 64])),
        padding=draw(st.integers(0, 2)),
    )


@settings(max_examples=250)
@given(case=cases(), seed=st.integers(0, 1000))
def test_fuzz(case: Case, seed: int) -> None:
    check(case, seed)


@settings(max_examples=150)
@given(
    q_len=st.integers(1, 2 * BLOCK_M),
    k_len=st.integers(1, 2 * BLOCK_M),
    causal=st.booleans(),
    window=st.none() | st.integers(1, BLOCK_M),
    tree_width=st.none() | st.integers(0, BLOCK_M),
)
def test_ranges_and_tiles_are_the_rules(
    q_len: int, k_len: int, causal: bool, window: int | None, tree_width: int | None
) -> None:
    tree = None if tree_width is None else torch.rand(1, q_len, tree_width) < 0.5
    rules = Visibility(q_len, k_len, causal, window, tree, None)
    seen = torch.zeros(q_len, k_len, dtype=torch.int)
    for rows, ranges in rules.row_blocks():
        for columns in ranges:
            seen[rows, columns] += 1 if (tile := rules.tile(rows, columns)) is None else tile[0, 0]
            if rules.is_square_causal(rows, columns):
                assert seen[rows, columns].equal(torch.ones_like(seen[rows, columns]).tril())
    tree = None if tree is None else tree[0]
    expected = reference.visible(q_len, k_len, causal=causal, window=window, tree_mask=tree)
    assert seen.equal(expected.int())


@pytest.mark.parametrize("dims", [(576, 512), (512, 512)])
def test_wide_heads(dims: tuple[int, int]) -> None:
    """The largest head dim is a producer's own; this one has none."""
    check(Case(dims=dims, num_kv_heads=1, q_lens=(1, 3), k_lens=(40, 33)))


def test_a_window_beyond_every_key() -> None:
    q, keys, options = make_inputs(Case(), 0)
    options["window"] = 2**31 - 1
    state = anabranch.attend(q, keys, **options, impl="torch")
    assert_right(state, q, keys, options)


def test_states_of_cut_keys_merge() -> None:
    case = Case(source="ragged", q_lens=(5,), k_lens=(60,), padding=0)
    q, keys, options = make_inputs(case, 0)
    parts = []
    for start, stop, causal in ((0, 21, False), (21, 40, False), (40, 60, True)):
        some = torch.tensor([0, stop - start], dtype=torch.int32)
        part = RaggedKV(keys.k[start:stop], keys.v[start:stop], some)
        parts.append(attend(q, part, **(options | {"causal": causal})))
    merged = merge_stacked(AttentionState(*map(torch.stack, zip(*parts, strict=True))))
    assert_right(merged, q, keys, options)


class Recorder(TorchDispatchMode):
    """Counts flash calls and remembers the largest tensor made."""

    def __init__(self) -> None:
        super().__init__()
        self.num_flash_calls = 0
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        del types
        result = func(*args, **(kwargs or {}))
        self.num_flash_calls += func is FLASH
        tensors = result if isinstance(result, tuple) else (result,)
        sizes = [x.numel() for x in tensors if isinstance(x, torch.Tensor)]
        self.largest = max(self.largest, *sizes, 0)
        return result


@pytest.mark.parametrize("options", [{"softcap": 5.0}, {"window": 500}, {}], ids=str)
def test_scores_are_never_whole(options: dict[str, object]) -> None:
    length = 16384
    q, keys, options = make_inputs(
        Case(
            q_lens=(length,), k_lens=(length,), source="ragged", num_kv_heads=1, group=1,
            dims=(8, 8), padding=0, **options,
        ),
        seed=0,
    )  # fmt: skip
    with Recorder() as recorder:
        state = attend(q, keys, **options)
    assert not state.out.isnan().any()
    assert recorder.largest < length**2 / 500


@pytest.mark.parametrize(
    "case",
    [
        Case(source="dense", q_lens=(20,) * 6, k_lens=(20,) * 6),
        Case(source="ragged", q_lens=(20,) * 6, k_lens=(20,) * 6),
        Case(source="paged", q_lens=(1,) * 6, k_lens=(50, 60, 55, 41, 42, 60)),
        Case(source="dense", q_lens=(1,) * 6, k_lens=(50, 60, 55, 41, 42, 60)),
    ],
    ids=lambda case: f"{case.source}-{case.q_lens[0]}",
)
@pytest.mark.parametrize("dim", [24, 32])
def test_one_call_for_a_batch(case: Case, dim: int) -> None:
    """Of torch's kernel, or where head dims are multiples of 16 of the one that reads in place."""
    q, keys, options = make_inputs(replace(case, dims=(dim, dim)), 0)
    with Recorder() as recorder:
        state = attend(q, keys, **options)
    assert_right(state, q, keys, options)
    assert recorder.num_flash_calls == (0 if native() and dim == 32 else 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [24, 64])
def test_sequences_without_room_for_keys(dim: int, dtype: torch.dtype) -> None:
    q, k = torch.randn(2, 4, dim).to(dtype), torch.empty(2, 0, 2, dim, dtype=dtype)
    starts = torch.zeros(3, dtype=torch.int32)
    for keys in (DenseKV(k, k), RaggedKV(k[0], k[0], starts)):
        state = anabranch.attend(q, keys)
        assert not state.out.any() and (state.lse == -torch.inf).all()


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"tree_width": 3}], ids=str)
def test_no_table_of_ragged_keys(options: dict[str, object]) -> None:
    """One long sequence among short ones takes no memory for these."""
    lengths = {"q_lens": (1,) * 100, "k_lens": (1,) * 99 + (3000,)}
    case = Case(source="ragged", num_kv_heads=1, dims=(16, 16), **lengths, **options)
    q, keys, options = make_inputs(case, 0)
    with Recorder() as recorder:
        state = attend(q, keys, **options)
    assert_right(state, q, keys, options)
    assert recorder.largest < 100 * 3000


def test_few_queries_over_pages_are_not_copied() -> None:
    """One call of the kernel that reads pages in place, none of torch's."""
    case = Case(source="paged", q_lens=(1, 2, 1), k_lens=(50, 60, 0), dims=(32, 32))
    q, keys, options = make_inputs(case, 0)
    with Recorder() as recorder:
        state = attend(q, keys, **options)
    assert_right(state, q, keys, options)
    assert recorder.num_flash_calls == (0 if native() else 1)
