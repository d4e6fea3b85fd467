"""An order of sequences in which all that share a prefix are neighbours, found on the device."""

from __future__ import annotations

import torch


def prefix_order(page_table: torch.Tensor, num_pages: torch.Tensor) -> torch.Tensor:
    """The order int64 [num_seqs] of the prefix tree: who shares most stands closest.

    page_table  int32 [num_seqs, max_pages]
    num_pages   [num_seqs]: pages of each sequence that may be shared

    Branches of the tree stand in the order of their first sequence, so a batch that is in order
    stays as it is. Memory grows with num_seqs^2 * (num_seqs + max_pages).
    """
    num_seqs, max_pages = page_table.shape
    seqs = torch.arange(num_seqs, device=page_table.device)
    if not num_seqs:
        return seqs
    places = torch.arange(max_pages, device=page_table.device)
    shared = page_table[:, None] == page_table[None]
    shared &= places < torch.minimum(num_pages[:, None], num_pages[None])[..., None]
    common = shared.cumprod(-1, dtype=torch.int32).sum(-1)
    common.fill_diagonal_(max_pages + 1)
    # Where i and j part, each goes on in a branch; `first` is the first sequence in that of i.
    closer = common[:, None] > common[:, :, None]  # [i, j, k]: k parts from i after j does
    first = torch.where(closer, seqs, num_seqs).amin(-1)
    places = (first > first.T).sum(-1)
    return torch.empty_like(seqs).scatter_(0, places, seqs)
