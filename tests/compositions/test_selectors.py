"""Selectors by what their lists attend to: the share of exact attention, exp(lse - lse of all)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import Case, integers, make_inputs
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch import (
    DenseKV,
    PageBounds,
    PagedKV,
    SelectedKV,
    append_kv,
    attend,
    bound_pages,
    extend_bounds,
    reference,
    select_pages,
    select_recent,
    select_top_keys,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
every_device = pytest.mark.parametrize("device", DEVICES)
BASE = Case(q_lens=(1,) * 4, k_lens=(70, 33, 5, 0), dims=(16, 16), group=2, padding=0, page_size=8)


def recall(q: torch.Tensor, keys: Any, selected: SelectedKV) -> torch.Tensor:
    """The share of each head's attention that its list has, NaN for a sequence without keys."""
    some = attend(q, selected, check=True).lse.double()
    return torch.exp(some - attend(q, keys).lse.double()).cpu()


def weights_of(q: torch.Tensor, keys: Any, seq: int) -> torch.Tensor:
    """Exact attention of one sequence, float64 [num_heads, k_len]."""
    k, _ = keys.gather(seq)
    k = k.double().cpu().repeat_interleave(q.shape[1] // keys.num_kv_heads, 1)
    return torch.softmax(torch.einsum("hd,khd->hk", q[seq].double().cpu(), k) / 4, -1)


@every_device
@pytest.mark.parametrize("source", ["dense", "paged", "paged by heads"])
def test_top_keys_have_the_largest_share(source: str, device: str) -> None:
    q, keys, _ = make_inputs(replace(BASE, source=source, device=device), 0)
    share = recall(q, keys, select_top_keys(q, keys, count=7))
    for seq, length in enumerate(BASE.k_lens[:3]):
        best = weights_of(q, keys, seq).topk(min(7, length)).values.sum(-1)
        torch.testing.assert_close(share[seq], best, rtol=1e-5, atol=1e-6)
    assert share[3].isnan().all()


@every_device
@pytest.mark.parametrize("by", ["kv head", "all"])
def test_heads_that_share_a_list(by: str, device: str) -> None:
    """Each of them finds its best key there."""
    q, keys, _ = make_inputs(replace(BASE, device=device), 0)
    selected = select_top_keys(q, keys, count=4, by=by)
    share = recall(q, keys, selected)
    assert selected.lists_per_token == (2 if by == "kv head" else 1)
    for seq in range(3):
        weights = weights_of(q, keys, seq)
        best = weights.amax(-1).unflatten(0, (selected.lists_per_token, -1)).argmax(-1)
        shares = share[seq].unflatten(0, (selected.lists_per_token, -1)).gather(1, best[:, None])
        largest = weights.amax(-1).unflatten(0, (selected.lists_per_token, -1))
        assert (shares[:, 0] >= largest.gather(1, best[:, None])[:, 0] - 1e-6).all()


@every_device
@pytest.mark.parametrize(("sinks", "recent"), [(4, 12), (0, 5), (3, 0), (40, 40)])
def test_sinks_and_recent_keys(sinks: int, recent: int, device: str) -> None:
    q, keys, _ = make_inputs(replace(BASE, device=device), 0)
    selected = select_recent(keys, sinks=sinks, recent=recent)
    share = recall(q, keys, selected)
    for seq, length in enumerate(BASE.k_lens):
        expected = {*range(min(sinks, length)), *range(max(length - recent, 0), length)}
        assert sorted(selected.indices[seq, : selected.counts[seq]].tolist()) == sorted(expected)
        if length:
            exact = weights_of(q, keys, seq)[:, sorted(expected)].sum(-1)
            torch.testing.assert_close(share[seq], exact, rtol=1e-5, atol=1e-6)


def clustered(device: str) -> tuple[torch.Tensor, PagedKV]:
    """Keys of a page are alike; each query is like the keys of one page."""
    centres = torch.nn.functional.normalize(torch.randn(3, 9, 2, 32), dim=-1) * 8
    pages = (centres[:, :, None] + 0.3 * torch.randn(3, 9, 8, 2, 32)).flatten(0, 1).to(device)
    case = Case(device=device)
    table = integers(case, [[*range(9 * seq, 9 * seq + 9)] for seq in range(3)])
    keys = PagedKV(pages, torch.randn_like(pages), table, integers(case, [72, 61, 10]))
    heads = [0, 1]
    q = torch.stack(
        [centres[seq, liked, heads] for seq, liked in enumerate(([3, 7], [0, 5], [1, 0]))]
    )
    return q.repeat_interleave(2, 1).to(device), keys


@every_device
@pytest.mark.parametrize("by", ["head", "kv head", "all"])
def test_pages_by_their_bounds(by: str, device: str) -> None:
    """Three pages of nine hold nearly all attention, where attention is on one or two of them."""
    q, keys = clustered(device)
    selected = select_pages(q, keys, bound_pages(keys), num_pages=3, by=by)
    share = recall(q, keys, selected)
    assert share.amin() > 0.99
    some = recall(q, keys, select_recent(keys, sinks=0, recent=24))
    assert some[:2].amin() < 0.1  # as many other keys do not


@settings(max_examples=20)
@given(st.data())
def test_no_key_scores_more_than_its_page(data: st.DataObject) -> None:
    lens = tuple(data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)))
    size = data.draw(st.integers(1, 9))
    case = Case(q_lens=(1,) * len(lens), k_lens=lens, dims=(8, 8), page_size=size, padding=0)
    q, keys, _ = make_inputs(case, data.draw(st.integers(0, 9)))
    low, high = bound_pages(keys)
    for seq, length in enumerate(lens):
        k = keys.gather(seq)[0].repeat_interleave(case.group, 1)
        scores = torch.einsum("hd,khd->hk", q[seq], k)
        pages = keys.page_table[seq, : -(-length // size)].long()
        bounds = [bound[pages].repeat_interleave(case.group, 1) * q[seq] for bound in (low, high)]
        most = torch.maximum(*bounds).sum(-1)
        held = most.repeat_interleave(size, 0)[:length].T
        assert (scores <= held + 1e-4).all()


@every_device
def test_bounds_follow_what_is_written(device: str) -> None:
    """Pages that are begun anew forget what they held."""
    case = replace(BASE, q_lens=(1, 1), k_lens=(21, 9), page_size=4, device=device)
    _, keys, _ = make_inputs(case, 0)
    bounds = bound_pages(keys)
    grown = replace(keys, seq_lens=integers(case, [23, 4]))
    k, v = torch.randn(2, 4, 2, 16, device=device)
    page, other = (int(keys.page_table[seq, place]) for seq, place in ((0, 5), (1, 0)))
    slots = integers(case, [page * 4 + 1, page * 4 + 2, -1, other * 4])
    append_kv(keys, k, v, slots)
    extend_bounds(bounds, k, slots, page_size=4)
    expected = bound_pages(grown)
    for mine, theirs in zip(bounds, expected, strict=True):
        assert torch.equal(mine[page], theirs[page])
        assert torch.equal(mine[other], k[3])


def test_refusals() -> None:
    q, keys, _ = make_inputs(BASE, 0)
    bounds = PageBounds(keys.k[:, 0], keys.k[:, 0])
    for message, call in (
        ("count must be at least 1, got 0", lambda: select_top_keys(q, keys, count=0)),
        ("by must be one of head", lambda: select_top_keys(q, keys, count=1, by="page")),
        ("num_pages must be at least 1", lambda: select_pages(q, keys, bounds, num_pages=0)),
        ("recent must not be negative", lambda: select_recent(keys, sinks=0, recent=-1)),
        ("q has num_seqs = 3", lambda: select_top_keys(q[:3], keys, count=1)),
        ("q must be one of float32", lambda: select_top_keys(q.half(), keys, count=1)),
        ("q has 3 heads", lambda: select_top_keys(q[:, :3], keys, count=1)),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_lists_are_exact_over_what_they_name() -> None:
    """The state over a selector's lists is the reference's over their keys."""
    q, keys, _ = make_inputs(BASE, 0)
    dense = DenseKV(keys.k, keys.v)
    assert select_recent(dense, sinks=1, recent=2).counts.tolist() == [3] * dense.num_seqs
    selected = select_top_keys(q, keys, count=9, by="all")
    state = attend(q, selected)
    listed = selected.indices[0, : selected.counts[0]].long()
    k, v = (x[listed] for x in keys.gather(0))
    exact = reference.attention(q[:1], k, v)
    torch.testing.assert_close(state.out[:1].double(), exact.out, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_replayed_with_other_lengths() -> None:
    """A graph that holds selectors and attention selects anew."""
    case = replace(BASE, k_lens=(700, 333, 50, 9), dims=(128, 128), device="cuda", page_size=16)
    q, keys, _ = make_inputs(case, 0)
    bounds = bound_pages(keys)

    def step() -> list[torch.Tensor]:
        lists = (
            select_recent(keys, sinks=4, recent=60),
            select_top_keys(q, keys, count=64),
            select_pages(q, keys, bounds, num_pages=4),
        )
        return [attend(q, selected).lse for selected in lists]

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = step()
    for lens in ((700, 333, 50, 9), (64, 1, 0, 5)):
        keys.seq_lens.copy_(integers(case, lens))
        q.copy_(torch.randn_like(q))
        graph.replay()
        for mine, theirs in zip(held, step(), strict=True):
            assert torch.equal(mine, theirs)
