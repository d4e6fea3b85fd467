"""Latent attention of one vLLM layer: absorbed queries over the rows of its cache."""

from __future__ import annotations

from typing import NamedTuple

import torch

from anabranch import AttentionState, LatentKV, append_kv
from anabranch.compositions.sections import LayerRules, attend_section
from anabranch.integrations.vllm.batch_metadata import BatchMetadata
from anabranch.integrations.vllm.cache_pages import E4M3


class LatentPages(NamedTuple):
    """The rows of one layer in vLLM's pages; with a scale, their bytes are e4m3 codes."""

    kv_cache: torch.Tensor  # [num_pages, page_size, kv_lora_rank + qk_rope_head_dim]
    kv_lora_rank: int
    scale: torch.Tensor | None  # float32, one element
    query_dtype: torch.dtype

    def keys(self, page_table: torch.Tensor, seq_lens: torch.Tensor) -> LatentKV:
        """The rows of sequences of these lengths."""
        return LatentKV(
            self.kv_cache if self.scale is None else self.kv_cache.view(E4M3),
            page_table,
            seq_lens,
            head_dim_v=self.kv_lora_rank,
            cache_scales=self.scale,
            query_dtype=self.query_dtype,
        )

    def write(self, kv_c: torch.Tensor, k_pe: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Put new rows into the cache; padding has no slot, or a negative one."""
        slots = slot_mapping.flatten()
        rows = torch.cat([kv_c, k_pe.flatten(1)], dim=-1)[: slots.shape[0]]
        no_table = torch.empty(0, 0, dtype=torch.int32, device=rows.device)
        append_kv(self.keys(no_table, no_table.flatten()), rows, None, slots)


def attend_latent_batch(
    layer: object,
    q: torch.Tensor,  # [num_tokens, num_heads, kv_lora_rank + qk_rope_head_dim], absorbed
    pages: LatentPages,
    batch: BatchMetadata,
    *,
    scale: float,
) -> AttentionState:
    """The state of [num_tokens, num_heads, kv_lora_rank], section by section."""
    batch.enter(layer)
    out = q.new_empty(*q.shape[:2], pages.kv_lora_rank)
    state = AttentionState(out, q.new_empty(q.shape[:2], dtype=torch.float32))
    for section in batch.sections():
        queries, keys = q[section.tokens], pages.keys(section.page_table, section.seq_lens)
        plan = batch.plans.find(section, queries, keys)
        into = AttentionState(state.out[section.tokens], state.lse[section.tokens])
        attend_section(section, queries, keys, LayerRules(scale), plan, into)
    return state
