"""Pages chosen by their bounds: as few as asked for, the best ones, and all where all fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tolerance import assert_close

from anabranch import PagedKV, append_kv, attend, bound_pages, reference, select_pages
from anabranch.compositions.page_choice import choose_pages, new_bounds, renew_bounds
from anabranch.compositions.selectors import PageBounds
from anabranch.implementations import FOLDERS

SIZE, NUM_KV_HEADS, GROUP, DIM = 4, 2, 3, 24
LENS = (70, 33, 5, 0, 4, 1)
WIDTH = 20
RUNS = [
    *(("cpu", impl) for impl in FOLDERS),
    pytest.param("cuda", "triton", marks=pytest.mark.gpu),
]
every_impl = pytest.mark.parametrize(("device", "impl"), RUNS)


def make(device: str, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, PagedKV]:
    """Shuffled pages that hold numbers in rows nobody uses as well."""
    draws = torch.Generator().manual_seed(0)
    num_pages = len(LENS) * WIDTH
    table = torch.randperm(num_pages, generator=draws).view(len(LENS), WIDTH).int()
    shape = (num_pages, SIZE, NUM_KV_HEADS, DIM)
    k, v = (torch.randn(shape, generator=draws).to(device, dtype) for _ in range(2))
    q = torch.randn(len(LENS), NUM_KV_HEADS * GROUP, DIM, generator=draws).to(device, dtype)
    lens = torch.tensor(LENS, dtype=torch.int32, device=device)
    return q, PagedKV(k, v, table.to(device), lens)


def slots_of(keys: PagedKV, seq: int, start: int, stop: int) -> torch.Tensor:
    places = torch.arange(start, stop, device=keys.device)
    pages = keys.page_table[seq].long()[places // SIZE]
    return pages * SIZE + places % SIZE


@every_impl
def test_bounds_follow_what_is_written(device: str, impl: str) -> None:
    """Chunks, single tokens, tokens that are not kept, and rows that are written again."""
    _, keys = make(device)
    bounds, k = new_bounds(keys.k), keys.k.clone()
    keys.k.zero_()
    lens = [0] * len(LENS)
    while lens != list(LENS):
        parts = [torch.tensor([-1], device=device)]
        for seq, length in enumerate(LENS):
            stop = min(lens[seq] + (1 if lens[seq] < 6 else 9, 13)[seq % 2], length)
            parts.append(slots_of(keys, seq, lens[seq], stop))
            lens[seq] = stop
        slots = torch.cat(parts)
        new = k.flatten(0, 1)[slots.clamp(min=0)]
        append_kv(keys, new, new, slots)
        renew_bounds(bounds, keys.k, slots, impl=impl)
    used = keys.page_table[0, : -(-LENS[0] // SIZE)].long()
    exact = bound_pages(keys)
    for mine, theirs in zip(bounds, exact, strict=True):
        assert torch.equal(mine[used], theirs[used])
    again = slots_of(keys, 0, 68, 69)  # a shorter sequence: what follows is forgotten
    append_kv(keys, k.flatten(0, 1)[again], k.flatten(0, 1)[again], again)
    renew_bounds(bounds, keys.k, again, impl=impl)
    assert torch.equal(bounds.low[again // SIZE][0], keys.k[again // SIZE, 0][0])


@every_impl
def test_all_pages_are_dense_attention(device: str, impl: str) -> None:
    q, keys = make(device)
    for num_pages in (18, 500):
        own, source = choose_pages(q, keys, bound_pages(keys), num_pages=num_pages, impl=impl)
        found = attend(own, source)
        exact = reference.attend(q.cpu(), _on_cpu(keys), cu_seqlens_q=torch.arange(len(LENS) + 1))
        torch_out = attend(q.cpu(), _on_cpu(keys)).out
        assert_close(found.out.view_as(q).cpu(), exact.out, torch_out)
        assert torch.equal(found.lse.flatten().isinf().cpu(), exact.lse.flatten().isinf().cpu())


def _on_cpu(keys: PagedKV) -> PagedKV:
    return PagedKV(*(x.cpu() for x in (keys.k, keys.v, keys.page_table, keys.seq_lens)))


@every_impl
@pytest.mark.parametrize("num_pages", [1, 2, 5, 8])
def test_the_pages_are_those_of_the_selector(num_pages: int, device: str, impl: str) -> None:
    q, keys = make(device)
    bounds = bound_pages(keys)
    own, source = choose_pages(q, keys, bounds, num_pages=num_pages, impl=impl)
    selected = select_pages(q, keys, bounds, num_pages=num_pages)
    assert source.seq_lens.tolist() == selected.counts.flatten().tolist()
    found, listed = attend(own, source), attend(q, selected)
    torch.testing.assert_close(found.out.view_as(q), listed.out)
    torch.testing.assert_close(found.lse.view(q.shape[:2]), listed.lse)
    longest = source.page_table[:NUM_KV_HEADS]
    assert (longest % (SIZE * NUM_KV_HEADS) == torch.arange(2, device=device)[:, None]).all()


@every_impl
def test_equal_scores_fill_the_list_once(device: str, impl: str) -> None:
    """All bounds equal: the last page and as many others, none twice."""
    q, keys = make(device)
    flat = PageBounds(*(torch.ones_like(x) for x in bound_pages(keys)))
    _, source = choose_pages(q, keys, flat, num_pages=6, impl=impl)
    for row in source.page_table[:NUM_KV_HEADS].tolist():
        assert len(set(row)) == 6
        assert row[-1] // (SIZE * NUM_KV_HEADS) == keys.page_table[0, 17]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_pages": 0}, "num_pages must be at least 1, got 0"),
        ({"impl": "abacus"}, "impl must be one of torch, triton, got 'abacus'"),
        ({"q": torch.zeros(6, 5, DIM)}, "q has 5 heads, not a multiple of 2"),
        ({"q": torch.zeros(6, 6, DIM).half()}, "float16"),
    ],
)
def test_refusals(change: dict[str, Any], message: str) -> None:
    q, keys = make("cpu")
    given: dict[str, Any] = {"q": q, "keys": keys, "bounds": bound_pages(keys), "num_pages": 2}
    with pytest.raises(ValueError, match=message):
        choose_pages(**(given | change))


def test_layouts_and_dtypes_that_have_no_pages_of_heads() -> None:
    q, keys = make("cpu")
    bounds = bound_pages(keys)
    by_heads = keys.v.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="laid out alike"):
        choose_pages(q, replace(keys, v=by_heads), bounds, num_pages=2)
    with pytest.raises(ValueError, match=r"plain keys.*int8"):
        new_bounds(keys.k.to(torch.int8))
