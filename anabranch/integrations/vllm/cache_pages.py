"""vLLM's cache of one layer, as attend and append_kv read and write it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from anabranch import PagedKV, append_kv

E4M3 = torch.float8_e4m3fn


class CacheScales(NamedTuple):
    """The scales of a layer's fp8 cache; vLLM changes their content in place."""

    k: torch.Tensor  # float32, one element
    v: torch.Tensor
    query_dtype: torch.dtype


class CachePages:
    """Keys and values in vLLM's pages; with scales, their bytes are e4m3 codes."""

    def __init__(
        self, kv_cache: torch.Tensor, head_dim: int, scales: CacheScales | None = None
    ) -> None:
        self.kv_cache = kv_cache  # [num_pages, num_kv_heads, page_size, 2 * head_dim]
        self.scales = scales
        rows = kv_cache.transpose(1, 2)
        rows = rows if scales is None else rows.view(E4M3)
        self.k, self.v = rows[..., :head_dim], rows[..., head_dim:]
        no_table = torch.empty(0, 0, dtype=torch.int32, device=kv_cache.device)
        self._without_table = self.keys(no_table, no_table.flatten())

    def keys(self, page_table: torch.Tensor, seq_lens: torch.Tensor) -> PagedKV:
        """The keys of sequences of these lengths."""
        if self.scales is None:
            return PagedKV(self.k, self.v, page_table, seq_lens)
        return PagedKV(self.k, self.v, page_table, seq_lens, *self.scales)

    def write(self, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Put new keys and values into the cache; padding has no slot, or a negative one."""
        num_slots = slot_mapping.shape[0]
        append_kv(self._without_table, k[:num_slots], v[:num_slots], slot_mapping)
