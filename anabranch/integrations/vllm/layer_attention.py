"""The attention of one layer of a vLLM model, over vLLM's cache."""

from __future__ import annotations

import torch

from anabranch import AttentionState, PagedKV, RaggedKV, append_kv, attend
from anabranch.integrations.vllm.batch_metadata import BatchMetadata
from anabranch.integrations.vllm.layer_options import LayerOptions


class CachePages:
    """The cache of one layer, as attend and append_kv read and write it."""

    def __init__(self, kv_cache: torch.Tensor, head_dim: int) -> None:
        self.kv_cache = kv_cache  # [num_pages, num_kv_heads, page_size, 2 * head_dim]
        rows = kv_cache.transpose(1, 2)
        self.k, self.v = rows[..., :head_dim], rows[..., head_dim:]
        no_table = torch.empty(0, 0, dtype=torch.int32, device=kv_cache.device)
        self._without_table = PagedKV(self.k, self.v, no_table, no_table.flatten())

    def write(self, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Put new keys and values into the cache; padding has no slot, or a negative one."""
        num_slots = slot_mapping.shape[0]
        append_kv(self._without_table, k[:num_slots], v[:num_slots], slot_mapping)


def state_around(output: torch.Tensor) -> AttentionState:
    """A state that attend writes `output` of, with a new LSE, which nobody reads."""
    lse = torch.empty(output.shape[:-1], dtype=torch.float32, device=output.device)
    return AttentionState(output, lse)


def attend_batch(
    layer: object,
    options: LayerOptions,
    q: torch.Tensor,  # [num_tokens or more, num_heads, head_dim]
    k: torch.Tensor | None,  # [num_tokens or more, num_kv_heads, head_dim], new keys
    v: torch.Tensor | None,
    pages: CachePages,
    batch: BatchMetadata,
    output: torch.Tensor,  # as q
) -> None:
    """Attend section by section into `output`; rows beyond the batch are left as they are."""
    if options.window is not None and not batch.causal:
        raise ValueError(f"a window needs causal attention, got window={options.window}")
    batch.enter(layer)
    for section in batch.sections():
        keys: PagedKV | RaggedKV
        if section.are_new and not options.reads_other_layer and k is not None and v is not None:
            keys = section.packed(k, v)
        else:
            keys = section.paged(pages.k, pages.v)
        queries = q[section.tokens]
        plan = batch.plan(
            queries, keys, section.cu_seqlens_q, causal=batch.causal, window=options.window
        )
        attend(
            queries,
            keys,
            cu_seqlens_q=section.cu_seqlens_q,
            causal=batch.causal,
            window=options.window,
            softcap=options.softcap,
            scale=options.scale,
            sinks=options.sinks,
            plan=plan,
            out=state_around(output[section.tokens]),
        )
