"""Decode context parallel: the keys of a sequence lie on several ranks, as vLLM deals them out."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any, NamedTuple

import torch

from anabranch import AttentionState, merge
from anabranch.compositions.sections import Section, attend_section
from anabranch.integrations.vllm.batch_metadata import BatchMetadata
from anabranch.integrations.vllm.cache_pages import CachePages
from anabranch.integrations.vllm.compat import combine_across_ranks
from anabranch.integrations.vllm.layer_attention import state_around
from anabranch.integrations.vllm.layer_options import LayerOptions


class ContextRanks(NamedTuple):
    """Ranks that take turns in holding the keys of a sequence."""

    group: Any  # vLLM's coordinator of the ranks
    combine: Any  # vLLM's merge of states across them: (out, lse, group, return_lse)
    interleave: int  # consecutive keys on one rank


def find_ranks(
    num_ranks: int, *, window: int | None, num_kv_heads: int, keys_of: str | None = None
) -> ContextRanks | None:
    """The ranks that vLLM was started with; None if a sequence's keys lie on one."""
    if num_ranks == 1:
        return None
    if window is not None:
        raise ValueError(
            f"decode context parallel over {num_ranks} ranks has no windows, "
            f"got sliding_window={window}"
        )
    if keys_of is not None:  # new keys are in the cache only, where a rank has its share of them
        raise ValueError(
            f"decode context parallel over {num_ranks} ranks has no layers that read another "
            f"layer's keys, got kv_sharing_target_layer_name={keys_of!r}"
        )
    if num_kv_heads != 1:  # query heads of all ranks are put together for each kv head
        raise ValueError(
            f"decode context parallel over {num_ranks} ranks needs one kv head a rank, "
            f"got num_kv_heads={num_kv_heads}"
        )
    vllm_config: Any = import_module("vllm.config")
    parallel_state: Any = import_module("vllm.distributed.parallel_state")
    config = vllm_config.get_current_vllm_config().parallel_config
    interleave = config.cp_kv_cache_interleave_size
    return ContextRanks(parallel_state.get_dcp_group(), combine_across_ranks(config), interleave)


def attend_across_ranks(
    layer: object,
    options: LayerOptions,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pages: CachePages,
    batch: BatchMetadata,
    output: torch.Tensor,
    ranks: ContextRanks,
) -> None:
    """attend_batch() where earlier keys are dealt out over ranks, and new ones are on all of them.

    Every rank attends with the heads of all ranks to the keys it holds; the merged states of its
    own heads then merge with the new keys, which are never read from pages: a rank's pages hold its
    share of them. A sink counts once, with the new keys.
    """
    batch.enter(layer)
    q, k, v = (x[: batch.num_tokens] for x in (q, k, v))
    starts, into = batch.query_start_loc, state_around(output[: batch.num_tokens])
    whole = Section(
        slice(0, batch.num_tokens), starts, batch.seq_lens, batch.block_table, causal=batch.causal
    )
    new, rules = whole.new_keys(k, v), options.rules
    plan = batch.plans.find(whole, q, new)
    if all(bounds.are_new for bounds in batch.bounds):  # the same on all ranks
        attend_section(whole, q, new, rules, plan, into)
        return
    lengths = batch.local_context_lens(
        rank=ranks.group.rank_in_group,
        num_ranks=ranks.group.world_size,
        interleave=ranks.interleave,
    )
    context = pages.keys(batch.block_table, lengths)
    of_all_ranks = ranks.group.all_gather(q.contiguous(), dim=1)
    earlier = replace(whole, causal=False)
    their_plan = batch.plans.find(earlier, of_all_ranks, context)
    unsunk = rules._replace(sinks=None)
    state = attend_section(earlier, of_all_ranks, context, unsunk, their_plan)
    out, lse = ranks.combine(state.out, state.lse, ranks.group, return_lse=True)
    of_new = attend_section(whole, q, new, rules, plan)
    merge(AttentionState(out, lse.contiguous()), of_new, out=into)
