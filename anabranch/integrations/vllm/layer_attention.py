"""The attention of one layer of a vLLM model, over vLLM's cache."""

from __future__ import annotations

import torch

from anabranch import AttentionState
from anabranch.compositions.sections import attend_section
from anabranch.integrations.vllm.batch_metadata import BatchMetadata
from anabranch.integrations.vllm.cache_pages import CachePages
from anabranch.integrations.vllm.layer_options import LayerOptions
from anabranch.keys import KeySource


def state_around(output: torch.Tensor) -> AttentionState:
    """A state whose `out` is `output`; its LSE is new memory and is not read."""
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
    batch.enter(layer)
    for section in batch.sections():
        keys: KeySource
        in_cache = options.reads_other_layer or pages.scales is not None
        if section.is_fresh and not in_cache and k is not None and v is not None:
            keys = section.new_keys(k, v)
        else:
            keys = pages.keys(section.page_table, section.seq_lens)
        queries, out = q[section.tokens], state_around(output[section.tokens])
        plan = batch.plans.find(section, queries, keys, window=options.window)
        attend_section(section, queries, keys, options.rules, plan, out)
