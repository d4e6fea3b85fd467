"""Selectors: which keys each query token attends to, as lists made on the device.

Nothing here reads a value on the host, and shapes depend on shapes only, so a captured graph that
holds a selector selects anew at each replay.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from anabranch.keys import PLAIN, DenseKV, PagedKV, SelectedKV
from anabranch.shapes import Sizes, check_dtype

BY = ("head", "kv head", "all")  # who shares a list


class PageBounds(NamedTuple):
    """The least and the largest value of every column of the keys of a page."""

    low: torch.Tensor  # [num_pages, num_kv_heads, head_dim_k]
    high: torch.Tensor


def select_recent(keys: DenseKV | PagedKV, *, sinks: int, recent: int) -> SelectedKV:
    """The first `sinks` and the last `recent` keys of each sequence, one list for all heads.

    The lengths of `keys` are those with the query's own key, one query token a sequence.
    """
    for name, count in (("sinks", sinks), ("recent", recent)):
        if count < 0:
            raise ValueError(f"{name} must not be negative, got {count}")
    lens = _lengths(keys)[:, None]
    places = torch.arange(sinks + recent, device=keys.device)
    last = lens - recent - sinks + places  # of the place in question, if nothing overlaps
    indices = torch.where(places < sinks, places, last.clamp(min=0))
    # A sequence shorter than both is listed whole.
    indices = torch.where(lens <= sinks + recent, places, indices).int()
    return SelectedKV(keys, indices, lens[:, 0].clamp(max=sinks + recent).int())


def select_top_keys(
    q: torch.Tensor, keys: DenseKV | PagedKV, *, count: int, by: str = "head"
) -> SelectedKV:
    """The `count` keys of the largest scores: the most that any list of this size can attend to.

    q       [num_seqs, num_heads, head_dim], one token a sequence
    by      "head": a list for each query head; "kv head" and "all": those that share a list rank
            keys by the largest score that one of them gives

    Every key is read, so this is what other selectors are measured by, not a way to be fast.
    """
    _check(q, keys, by, "count", count)
    _check_plain(keys)
    k = _every_key(keys)
    grouped = _by_kv_head(q, keys)
    scores = torch.einsum("shgd,skhd->shgk", grouped, k.float())
    places = torch.arange(k.shape[1], device=q.device)
    lens = _lengths(keys)
    hidden = (places >= lens[:, None])[:, None, None]
    ranked = _share(scores.masked_fill(hidden, -torch.inf), by)
    count = min(count, k.shape[1])
    indices = ranked.topk(count, -1).indices.int()
    counts = lens.clamp(max=count).int().view(-1, *(1,) * (indices.dim() - 2))
    return SelectedKV(keys, indices, counts.expand(indices.shape[:-1]).contiguous())


def bound_pages(keys: PagedKV) -> PageBounds:
    """The bounds of all pages that sequences use; every key is read once.

    Unused pages have a low bound of inf and a high one of -inf: no key is inside them.
    """
    _check_plain(keys)
    held = _keys_of_pages(keys)[:, None, None, None]
    used = torch.arange(keys.page_size, device=keys.device)[:, None, None] < held
    low = keys.k.masked_fill(~used, torch.inf).amin(1)
    return PageBounds(low, keys.k.masked_fill(~used, -torch.inf).amax(1))


def extend_bounds(
    bounds: PageBounds, k: torch.Tensor, slot_mapping: torch.Tensor, *, page_size: int
) -> None:
    """Widen bounds, in place, by keys that are written; row 0 of a page begins it anew.

    k             [num_tokens, num_kv_heads, head_dim_k]
    slot_mapping  as in append_kv(): page * page_size + row, negative for keys that are not written
    """
    slots = slot_mapping.long()
    written, pages = slots >= 0, slots.clamp(min=0) // page_size
    begun = written & (slots % page_size == 0)
    columns = (slice(None), None, None)
    fresh = torch.zeros(bounds.low.shape[0], dtype=torch.int32, device=k.device)
    fresh = fresh.scatter_reduce(0, pages, begun.int(), "amax") > 0
    for bound, reduce, none in (
        (bounds.low, "amin", torch.inf),
        (bounds.high, "amax", -torch.inf),
    ):
        index = pages[columns].expand_as(k)
        bound.masked_fill_(fresh[columns], none)
        bound.scatter_reduce_(0, index, k.masked_fill(~written[columns], none), reduce)


def select_pages(
    q: torch.Tensor, keys: PagedKV, bounds: PageBounds, *, num_pages: int, by: str = "kv head"
) -> SelectedKV:
    """All keys of the `num_pages` pages that could hold the largest score, the last one included.

    The bound of a page is the sum over columns of max(q * low, q * high), as in Quest: no key of
    the page scores more. Only bounds are read, not keys. Options are those of select_top_keys().
    """
    _check(q, keys, by, "num_pages", num_pages)
    size, lens, table = keys.page_size, _lengths(keys), keys.page_table
    num_pages = min(num_pages, table.shape[1])
    places = torch.arange(table.shape[1], device=q.device)
    last = (lens - 1) // size
    hidden = places > last[:, None]
    pages = torch.where(hidden, 0, table).long()
    grouped = _by_kv_head(q, keys)
    positive, negative = grouped.clamp(min=0), grouped.clamp(max=0)
    low, high = (bound[pages].float() for bound in bounds)
    scores = torch.einsum("shgd,sphd->shgp", positive, high)
    scores += torch.einsum("shgd,sphd->shgp", negative, low)
    scores = scores.masked_fill((places == last[:, None])[:, None, None], torch.inf)
    ranked = _share(scores.masked_fill(hidden[:, None, None], -torch.inf), by)
    chosen = ranked.topk(num_pages, -1).indices.sort(-1).values
    # Pages in ascending order: hidden ones and the rows after the last key come last.
    indices = (chosen[..., None] * size + torch.arange(size, device=q.device)).flatten(-2)
    shape = (-1, *(1,) * (indices.dim() - 1))
    counts = (indices < lens.view(shape)).sum(-1).int()
    return SelectedKV(keys, indices.int(), counts)


def _check(q: torch.Tensor, keys: DenseKV | PagedKV, by: str, name: str, count: int) -> None:
    sizes = Sizes()
    sizes.bind("num_seqs", keys.num_seqs, "keys")
    sizes.bind("head_dim_k", keys.head_dim_k, "keys")
    sizes.match("q", q, "num_seqs num_heads head_dim_k")
    check_dtype("q", q, (keys.dtype,))
    if q.shape[1] % keys.num_kv_heads:
        raise ValueError(f"q has {q.shape[1]} heads, not a multiple of {keys.num_kv_heads}")
    if by not in BY:
        raise ValueError(f"by must be one of {', '.join(BY)}, got {by!r}")
    if count < 1:
        raise ValueError(f"{name} must be at least 1, got {count}")


def _check_plain(keys: DenseKV | PagedKV) -> None:
    if keys.view().k.format != PLAIN:
        raise ValueError(f"scores need plain keys, got the format {keys.view().k.format.name}")


def _lengths(keys: DenseKV | PagedKV) -> torch.Tensor:
    """int64 [num_seqs], no more than the storage holds."""
    if keys.seq_lens is None:
        return torch.full((keys.num_seqs,), keys.capacity, device=keys.device)
    return keys.seq_lens.long().clamp(0, keys.capacity)


def _every_key(keys: DenseKV | PagedKV) -> torch.Tensor:
    """[num_seqs, capacity, num_kv_heads, head_dim_k], zero after a sequence's last key."""
    places = torch.arange(keys.capacity, device=keys.device)
    inside = places < _lengths(keys)[:, None]
    view = keys.view()
    k = keys.k
    if view.page_table is not None:
        used = inside[:, :: view.page_size]
        pages = torch.where(used, view.page_table, 0).long()
        k = k[pages].flatten(1, 2)
    return k.masked_fill(~inside[..., None, None], 0)


def _by_kv_head(q: torch.Tensor, keys: DenseKV | PagedKV) -> torch.Tensor:
    """float32 [num_seqs, num_kv_heads, group, head_dim_k]."""
    group = q.shape[1] // keys.num_kv_heads
    return q.reshape(q.shape[0], keys.num_kv_heads, group, q.shape[2]).float()


def _share(scores: torch.Tensor, by: str) -> torch.Tensor:
    """[num_seqs, num_kv_heads, group, keys] ranked by those that share a list."""
    if by == "head":
        return scores.flatten(1, 2)
    return scores.amax(2) if by == "kv head" else scores.amax((1, 2))


def _keys_of_pages(keys: PagedKV) -> torch.Tensor:
    """How many keys each page holds for the sequence that has most of them there."""
    size = keys.page_size
    places = torch.arange(keys.page_table.shape[1], device=keys.device)
    held = (_lengths(keys)[:, None] - places * size).clamp(0, size)
    pages = torch.where(held > 0, keys.page_table, 0).long()
    count = torch.zeros(keys.k.shape[0], dtype=torch.int64, device=keys.device)
    return count.scatter_reduce(0, pages.flatten(), held.flatten(), "amax")
