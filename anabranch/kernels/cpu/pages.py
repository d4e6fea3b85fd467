"""Attention over a paged cache on the CPU by a kernel of ours, without copying keys."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import NamedTuple

import torch

from anabranch.kernels.cpu.append_kv import append_kv
from anabranch.kernels.cpu.native import native
from anabranch.keys import PLAIN, KeyStore, PagedKV
from anabranch.keys.formats import E4M3
from anabranch.state import AttentionState, merge_stacked

LANES = 16  # head dims are multiples of it
MAX_DIM = 256
NO_WINDOW = 1 << 40
CODES = {torch.float32: 0, torch.int8: 1, E4M3: 2}  # as the kernel names what a cache holds


def reads_pages(
    q: torch.Tensor,  # [num_tokens, num_heads, head_dim_k]
    keys: PagedKV,
    cu_seqlens_q: torch.Tensor,  # int32 [num_seqs + 1]
    *,
    softcap: float | None,
    tree_mask: torch.Tensor | None,
) -> bool:
    """Whether `attend_pages` can serve a call."""
    if q.dtype != torch.float32 or not len(keys.seq_lens):
        return False
    if softcap is not None or tree_mask is not None:
        return False
    dims = (q.shape[2], keys.v.shape[-1])
    rows = (q, keys.k, keys.v, keys.page_table, keys.seq_lens, cu_seqlens_q)
    return (
        all(dim % LANES == 0 and dim <= MAX_DIM for dim in dims)
        and all(x.stride(-1) == 1 for x in rows)
        and native() is not None
    )


class NewKeys(NamedTuple):
    """Keys and values of the step's own tokens, and where they are kept."""

    k: torch.Tensor  # [num_tokens, num_kv_heads, head_dim_k]
    v: torch.Tensor  # [num_tokens, num_kv_heads, head_dim_v]
    slot_mapping: torch.Tensor  # int64 [num_tokens], negative = not kept
    saturated: torch.Tensor | None = None  # int32 [1], added to where a cache is quantised


def attend_pages(
    q: torch.Tensor,  # [num_tokens, num_heads, head_dim_k]
    keys: PagedKV,
    cu_seqlens_q: torch.Tensor,  # int32 [num_seqs + 1]
    *,
    causal: bool,
    window: int | None,
    scale: float,
    new: NewKeys | None = None,  # written to the pages first
) -> AttentionState:
    """The state of every query; rows of no sequence are empty."""
    stores = keys.stores()
    if new is not None and any(store.format != PLAIN for store in stores):
        append_kv(stores, (new.k, new.v), new.slot_mapping, new.saturated)
        new = None
    num_tokens, num_heads = q.shape[:2]
    num_splits = select_splits(keys, cu_seqlens_q, num_heads)
    out = q.new_zeros(num_splits, num_tokens, num_heads, keys.v.shape[-1])
    lse = q.new_full((num_splits, num_tokens, num_heads), -torch.inf)
    limit = NO_WINDOW if window is None else window
    sizes = attention_sizes(q, keys, new, num_splits, limit, causal=causal)
    status = native().attend_pages(
        *(each.data_ptr() for each in (q, keys.k, keys.v)),
        *(None if each.scales is None else each.scales.ptr.data_ptr() for each in stores),
        _levels().data_ptr(),
        *(each.data_ptr() for each in (keys.page_table, keys.seq_lens, cu_seqlens_q)),
        *((None, None, None) if new is None else (each.data_ptr() for each in new[:3])),
        out.data_ptr(),
        lse.data_ptr(),
        (ctypes.c_int64 * len(sizes))(*sizes),
        scale,
        torch.get_num_threads(),
    )
    check_status(status, keys)
    states = AttentionState(out, lse)
    return AttentionState(out[0], lse[0]) if num_splits == 1 else merge_stacked(states)


def attention_sizes(
    q: torch.Tensor,
    keys: PagedKV,
    new: NewKeys | None,
    num_splits: int,
    window: int,
    *,
    causal: bool,
) -> tuple[int, ...]:
    """Strides and sizes in the order in which the kernel reads them."""
    num_tokens, num_heads, dim_k = q.shape
    num_kv_heads, dim_v = keys.v.shape[2:]
    return (
        *(*q.stride()[:2], *keys.k.stride()[:3], *keys.v.stride()[:3]),
        *(len(keys.seq_lens), num_tokens, num_kv_heads, num_heads // num_kv_heads, dim_k, dim_v),
        *(len(keys.k), keys.page_table.shape[1], keys.page_table.stride(0), keys.page_size),
        *(num_splits, window, causal),
        *((0, 0, 0, 0) if new is None else (*new.k.stride()[:2], *new.v.stride()[:2])),
        *(size for store in keys.stores() for size in _format_sizes(store)),
    )


def _format_sizes(store: KeyStore) -> tuple[int, ...]:
    """What the kernel reads of a format: codes, kind of scales, elements of a scale, strides."""
    kind, scales = CODES[store.ptr.dtype], store.scales
    if scales is None:
        return (kind, 0, 0, 0, 0, 0, 0)
    block = store.ptr.shape[-1] // scales.ptr.shape[-1]
    is_half = scales.ptr.dtype == torch.float16
    return (kind, is_half, block, scales.page, scales.key, scales.head, scales.block)


@cache
def _levels() -> torch.Tensor:
    """Numbers of the codes of e4m3, float32 [256]."""
    return torch.arange(256, dtype=torch.uint8).view(E4M3).float()


def check_status(status: int, keys: PagedKV) -> None:
    """Raise an IndexError for what the kernel refused."""
    if status > 0:
        seq = status - 1
        raise IndexError(
            f"sequence {seq} of {int(keys.seq_lens[seq])} keys has pages outside the cache of "
            f"{len(keys.k)} pages, or more keys than its row of the page table holds"
        )
    if status < 0:
        slots = len(keys.k) * keys.page_size
        raise IndexError(f"token {-status - 1} has a slot outside the {slots} of the cache")


def select_splits(keys: PagedKV, cu_seqlens_q: torch.Tensor, num_heads: int) -> int:
    """Into how many parts the kernel cuts keys, each with states of its own."""
    num_kv_heads = keys.k.shape[2]
    return native().select_splits(
        keys.seq_lens.data_ptr(),
        cu_seqlens_q.data_ptr(),
        len(keys.seq_lens),
        num_kv_heads,
        num_heads // num_kv_heads,
        torch.get_num_threads(),
    )
