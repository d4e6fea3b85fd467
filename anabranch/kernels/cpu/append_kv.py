"""Writing new tokens into a paged cache of any strides."""

from __future__ import annotations

import torch


def refusal(device: torch.device) -> str | None:
    """Why keys on a device cannot be written; None if they can."""
    return None if device.type == "cpu" else f"it is the CPU's, got keys on {device}"


def append_kv(
    k_cache: torch.Tensor,  # [num_pages, page_size, num_kv_heads, head_dim_k]
    v_cache: torch.Tensor,  # [num_pages, page_size, num_kv_heads, head_dim_v]
    k: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim_k]
    v: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim_v]
    slot_mapping: torch.Tensor,  # integer [num_tokens], page * page_size + row; negative = skip
) -> None:
    """Write each token to its slot, in place."""
    slots = slot_mapping.long()
    kept = slots >= 0
    if not kept.all():
        slots, k, v = slots[kept], k[kept], v[kept]
    page_size = k_cache.shape[1]
    pages, rows = slots // page_size, slots % page_size
    k_cache[pages, rows] = k
    v_cache[pages, rows] = v
