"""choose_pages(): decode over the pages that could hold the largest scores, for each kv head.

A page is never cut, so every kv head of a sequence is a sequence of few pages: no lists of keys
are made, and lengths depend on lengths only, so that the layers of a step share a plan.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from anabranch.compositions.selectors import PageBounds
from anabranch.implementations import load_implementation
from anabranch.keys import PagedKV
from anabranch.shapes import FLOATS, Sizes, check_dtype

MOST_PAGES = 32768  # of a sequence, whose scores one program holds


def new_bounds(k: torch.Tensor) -> PageBounds:
    """Bounds of a cache [num_pages, page_size, num_kv_heads, head_dim_k] that holds zeros."""
    if k.dtype not in FLOATS:
        raise ValueError(f"bounds need plain keys of {', '.join(map(str, FLOATS))}, got {k.dtype}")
    shape = (k.shape[0], *k.shape[2:])
    return PageBounds(k.new_zeros(shape), k.new_zeros(shape))


def renew_bounds(
    bounds: PageBounds, k: torch.Tensor, slot_mapping: torch.Tensor, *, impl: str | None = None
) -> None:
    """Bounds of the pages that append_kv() has just written to, in place, from their keys.

    k             the cache, after the write
    slot_mapping  that of append_kv(): tokens of a sequence follow each other; what a page holds
                  after its last written row no longer counts
    """
    load_implementation("choose_pages", impl, k.device).renew_bounds(*bounds, k, slot_mapping)


def choose_pages(
    q: torch.Tensor,
    keys: PagedKV,
    bounds: PageBounds,
    *,
    num_pages: int,
    lens: torch.Tensor | None = None,
    impl: str | None = None,
) -> tuple[torch.Tensor, PagedKV]:
    """Queries and keys for an attend() over at most `num_pages` pages for each kv head.

    q        [num_seqs, num_heads, head_dim], one token a sequence
    bounds   of all pages that sequences use
    lens     those of the keys that another layer of the step was given, to save making them

    Chosen are the last page and those of the highest bound, which is the sum over columns of
    max(q * low, q * high), as in Quest. Every kv head becomes a sequence with the query heads of
    its group, so the result is [num_seqs * num_kv_heads, group, head_dim] in the same order. A
    sequence of no more than `num_pages` pages is kept whole.
    """
    sizes = Sizes()
    sizes.bind("num_seqs", keys.num_seqs, "keys")
    sizes.bind("head_dim_k", keys.head_dim_k, "keys")
    sizes.match("q", q, "num_seqs num_heads head_dim_k")
    check_dtype("q", q, (keys.dtype,))
    num_heads, num_kv_heads, width = q.shape[1], keys.num_kv_heads, keys.page_table.shape[1]
    if num_heads % num_kv_heads:
        raise ValueError(f"q has {num_heads} heads, not a multiple of {num_kv_heads}")
    if num_pages < 1:
        raise ValueError(f"num_pages must be at least 1, got {num_pages}")
    if width > MOST_PAGES:
        raise ValueError(f"a table of up to {MOST_PAGES} pages can be chosen from, got {width}")
    step = _page_step(keys)
    table = load_implementation("choose_pages", impl, q.device).choose_pages(
        q if q.stride(-1) == 1 else q.contiguous(),
        *bounds,
        keys.page_table,
        keys.seq_lens,
        num_chosen=num_pages,
        page_size=keys.page_size,
        page_step=step,
    )
    if lens is None:
        lens = kept_lens(keys.seq_lens, num_pages, keys.page_size).repeat_interleave(num_kv_heads)
    k, v = (_heads_as_pages(x) for x in (keys.k, keys.v))
    own = q.reshape(-1, num_heads // num_kv_heads, q.shape[2])
    return own, replace(keys, k=k, v=v, page_table=table, seq_lens=lens)


def kept_lens(seq_lens: torch.Tensor, num_pages: int, page_size: int) -> torch.Tensor:
    """Keys that are left of each sequence, int32: whole pages, and what the last one holds."""
    tail = (seq_lens - 1) % page_size + 1
    return torch.minimum(seq_lens, tail + (num_pages - 1) * page_size)


def _page_step(keys: PagedKV) -> int:
    """How many kv heads lie from one page to the next, the same in both caches."""
    steps: list[int] = []
    for name, x in (("k", keys.k), ("v", keys.v)):
        if x.dtype not in FLOATS or x.stride(0) % x.stride(2):
            raise ValueError(
                f"pages are chosen of plain caches whose pages hold whole heads, got {name} of "
                f"{x.dtype} with strides {x.stride()}"
            )
        steps.append(x.stride(0) // x.stride(2))
    if steps[0] != steps[1]:
        raise ValueError(f"k and v must be laid out alike, got strides of {steps} heads a page")
    return steps[0]


def _heads_as_pages(x: torch.Tensor) -> torch.Tensor:
    """Pages of one kv head: number `page * step + head` begins at that head of that page."""
    num_pages, page_size, num_kv_heads, dim = x.shape
    page, key, head, column = x.stride()
    count = (num_pages - 1) * (page // head) + num_kv_heads if num_pages else 0
    return x.as_strided((count, page_size, 1, dim), (head, key, head, column))
