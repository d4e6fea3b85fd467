"""Keys of a paged cache as packed numbers, on a CPU."""

from __future__ import annotations

import torch

from anabranch.keys import KeyStore
from anabranch.keys.formats import rows_of

KEYS = 1024  # decoded at once


def expand_pages(
    stores: tuple[KeyStore, ...],
    page_table: torch.Tensor,  # int32 [num_seqs, max_pages]
    spans: torch.Tensor,  # int32 [3 * num_spans], as in kernels/triton
    first_head: int,
    k: torch.Tensor,  # [num_keys, num_heads, head_dim_k]
    v: torch.Tensor,
) -> None:
    """Write the keys of spans one after the other, for the heads from `first_head` on."""
    ends, seqs, skipped = spans.long().view(3, -1)
    heads, largest = slice(first_head, first_head + k.shape[1]), torch.finfo(k.dtype).max
    page_size = stores[0].ptr.shape[1]
    for first in range(0, len(k), KEYS):
        packed = torch.arange(first, min(first + KEYS, len(k)))
        found = torch.searchsorted(ends, packed, right=True)
        keys = packed + skipped[found]
        pages = page_table[seqs[found], keys // page_size].long()
        for store, out in zip(stores, (k, v), strict=True):
            rows = rows_of(store).read(pages, keys % page_size, torch.float32)[:, heads]
            out[first : first + KEYS] = rows.clamp(-largest, largest)
