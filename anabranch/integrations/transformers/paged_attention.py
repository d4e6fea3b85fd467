"""The attention of a layer in transformers' continuous batching, over its paged cache.

Keys are attended to where they lie; transformers' own functions copy the whole context first.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from anabranch import PagedKV, RaggedKV, attend
from anabranch.integrations.transformers.attention import check_supported


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, num_heads, num_tokens, head_dim]
    key: torch.Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    value: torch.Tensor,
    attention_mask: object,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    block_table: object = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls for `attn_implementation="paged|anabranch"`.

    The other arguments are its `PagedAttentionArgs`. Returns [1, num_tokens, num_heads, head_dim].
    """
    check_supported(query, dropout, kwargs)
    if kwargs.get("cache") is None:
        raise ValueError("paged|anabranch is for generate_batch; elsewhere use 'anabranch'")
    if attention_mask is not None or block_table is not None:
        raise ValueError("paged|anabranch reads read_index, got an attention_mask or a block_table")
    layer_idx: Any = module.layer_idx
    window = kwargs["cache"].sliding_windows[layer_idx]
    window = None if window == 1 else window  # the mark of layers that have none
    state = attend(
        query[0].transpose(0, 1),
        _update(key, value, layer_idx, window, **kwargs),
        cu_seqlens_q=cu_seq_lens_q,
        window=window,
        scale=scaling,
        softcap=softcap,
        sinks=s_aux,
    )
    return state.out[None], None


def _update(
    key: torch.Tensor,
    value: torch.Tensor,
    layer_idx: int,
    window: int | None,
    *,
    cache: Any,
    cu_seq_lens_k: Any,  # int32 [num_seqs + 1], or one for each kind of layer
    max_seqlen_k: Any,
    max_seqlen_q: int,
    read_index: list[torch.Tensor],  # for each group of layers, the slots of all keys
    write_index: list[torch.Tensor],  # for each group of layers, the slots of the new keys
    **_: Any,
) -> PagedKV | RaggedKV:
    """Write the new keys, and say where all keys of the batch lie."""
    cu_seqlens: torch.Tensor = _of_kind(cu_seq_lens_k, window)
    longest: int = _of_kind(max_seqlen_k, window)
    group, layer = cast("tuple[int, int]", cache.layer_index_to_group_indices[layer_idx])
    reads, writes = read_index[group], write_index[group]
    if reads.numel() and window is not None and max_seqlen_q > 1:
        # New keys take the slots of old ones that the first of the new tokens still see, so
        # transformers copies both: at most window - 1 old keys a sequence.
        k, v = cache.update(key, value, layer_idx, read_index, write_index)
        return RaggedKV(k, v, cu_seqlens)
    stored = cache.key_cache[layer], cache.value_cache[layer]
    new = key[0].transpose(0, 1), value[0].transpose(0, 1)
    for slots, x in zip(stored, new, strict=True):
        slots.index_copy_(0, writes, x)
    if not reads.numel():  # no sequence has a past
        return RaggedKV(*new, cu_seqlens)
    if window is None:
        pages = _slots(reads, cu_seqlens, longest, cache.block_size) // cache.block_size
        return _paged(*stored, cache.block_size, pages, cu_seqlens)
    pages = _slots(reads, cu_seqlens, longest, 1)
    pages = torch.where(pages == cache.sentinel_index, writes[:, None], pages)
    return _paged(*stored, 1, pages, cu_seqlens)


def _of_kind(given: Any, window: int | None) -> Any:
    """What a layer is given; models that mix kinds of layers have a dict of it."""
    if not isinstance(given, dict):
        return given
    return cast("Any", given)["full_attention" if window is None else "sliding_attention"]


def _slots(reads: torch.Tensor, cu_seqlens: torch.Tensor, longest: int, step: int) -> torch.Tensor:
    """The slots of every `step`-th key of each sequence; anything behind its end."""
    steps = torch.arange(0, longest, step, device=reads.device)
    return reads[(cu_seqlens[:-1, None] + steps).clamp_max(len(reads) - 1)]


def _paged(
    k: torch.Tensor, v: torch.Tensor, page_size: int, pages: torch.Tensor, cu_seqlens: torch.Tensor
) -> PagedKV:
    k, v = (x.view(-1, page_size, *x.shape[1:]) for x in (k, v))
    return PagedKV(k, v, pages.int(), cu_seqlens.diff())
