"""Bounds of pages, and the pages of the largest bounds, on a CPU."""

from __future__ import annotations

import torch


def renew_bounds(
    low: torch.Tensor, high: torch.Tensor, k: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Bounds of the pages that hold these slots, over their rows up to the last of the slots."""
    size = k.shape[1]
    written = slot_mapping[slot_mapping >= 0].long()
    last = torch.full((k.shape[0],), -1)
    last.scatter_reduce_(0, written // size, written % size, "amax")
    pages = (last >= 0).nonzero()[:, 0]
    hidden = (torch.arange(size) > last[pages, None])[..., None, None]
    low[pages] = k[pages].masked_fill(hidden, torch.inf).amin(1)
    high[pages] = k[pages].masked_fill(hidden, -torch.inf).amax(1)


def choose_pages(
    q: torch.Tensor,  # [num_seqs, num_heads, head_dim]
    low: torch.Tensor,  # [num_pages, num_kv_heads, head_dim]
    high: torch.Tensor,
    page_table: torch.Tensor,  # int32 [num_seqs, max_pages]
    seq_lens: torch.Tensor,  # int32 [num_seqs]
    *,
    num_chosen: int,
    page_size: int,
    page_step: int,
) -> torch.Tensor:
    """The table int32 [num_seqs * num_kv_heads, num_chosen], of numbers page * step + kv head."""
    num_seqs, num_kv_heads = q.shape[0], low.shape[1]
    places = torch.arange(page_table.shape[1])
    last = (seq_lens.long()[:, None] - 1) // page_size
    hidden = (places > last)[:, None]
    pages = torch.where(hidden[:, 0], 0, page_table).long()
    grouped = q.reshape(num_seqs, num_kv_heads, -1, q.shape[2]).float()
    scores = torch.einsum("shgd,sphd->shgp", grouped.clamp(min=0), high[pages].float())
    scores += torch.einsum("shgd,sphd->shgp", grouped.clamp(max=0), low[pages].float())
    best = scores.amax(2).masked_fill((places == last)[:, None], torch.inf)
    best = best.masked_fill(hidden, -torch.inf)
    chosen = best.topk(min(num_chosen, page_table.shape[1]), -1).indices.sort(-1).values
    numbers = pages[:, None].expand(-1, num_kv_heads, -1).gather(2, chosen) * page_step
    return (numbers + torch.arange(num_kv_heads)[:, None]).int().flatten(0, 1)
