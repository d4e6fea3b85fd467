"""Attention on the CPU by a kernel of ours, over pages and contiguous keys, without copies."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import NamedTuple

import torch

from anabranch.call import Queries
from anabranch.kernels.cpu.append_kv import append_kv
from anabranch.kernels.cpu.native import native
from anabranch.keys import PLAIN, KeySource, KeyStore
from anabranch.keys.formats import E4M3
from anabranch.state import AttentionState, merge_stacked

LANES = 16  # head dims are multiples of it
MAX_DIM = 256
NO_WINDOW = 1 << 40
CODES = {torch.float32: 0, torch.int8: 1, E4M3: 2}  # as the kernel names what a cache holds


def reads_pages(
    q: torch.Tensor,  # [num_tokens, num_heads, head_dim_k]
    keys: KeySource,
    cu_seqlens_q: torch.Tensor,  # int32 [num_seqs + 1]
    *,
    softcap: float | None,
    tree_mask: torch.Tensor | None,
) -> bool:
    """Whether `attend_pages` can serve a call."""
    if q.dtype != torch.float32 or softcap is not None or tree_mask is not None:
        return False
    if not keys.num_seqs or not keys.capacity:
        return False
    view, dims = keys.view(), (q.shape[2], keys.head_dim_v)
    return (
        (view.is_pages or (keys.is_contiguous and view.is_plain))
        and all(dim % LANES == 0 and dim <= MAX_DIM for dim in dims)
        and all(x.stride(-1) == 1 for x in (q, view.k.ptr, view.v.ptr, cu_seqlens_q))
        and native() is not None
    )


class StoredKeys(NamedTuple):
    """Keys as the kernel finds them: contiguous ones are a page a sequence, at its origin."""

    source: KeySource
    k: KeyStore
    v: KeyStore
    page_table: torch.Tensor  # int32 [num_seqs, max_pages], or origins [num_seqs, 1]
    seq_lens: torch.Tensor  # int32 [num_seqs]
    page_size: int
    page_step: int  # rows between two pages; 1 where a sequence begins at any row
    num_rows: int  # of the whole storage


def find_keys(keys: KeySource) -> StoredKeys:
    """Where the keys of a call lie that `reads_pages`."""
    view, (seq_lens, cu_seqlens) = keys.view(), keys.lengths
    table, size, num_rows = view.page_table, keys.capacity, keys.total_capacity
    if table is not None:
        size, num_rows = view.page_size, len(view.k.ptr) * view.page_size
    elif cu_seqlens is not None:
        table, seq_lens = cu_seqlens[:-1, None], cu_seqlens.diff()
    else:
        table = torch.arange(keys.num_seqs, dtype=torch.int32)[:, None]
    if seq_lens is None:
        seq_lens = torch.full((keys.num_seqs,), keys.capacity, dtype=torch.int32)
    return StoredKeys(keys, view.k, view.v, table, seq_lens, size, view.page_size, num_rows)


class NewKeys(NamedTuple):
    """Keys and values of the step's own tokens, and where they are kept."""

    k: torch.Tensor  # [num_tokens, num_kv_heads, head_dim_k]
    v: torch.Tensor  # [num_tokens, num_kv_heads, head_dim_v]
    slot_mapping: torch.Tensor  # int64 [num_tokens], negative = not kept
    saturated: torch.Tensor | None = None  # int32 [1], added to where a cache is quantised


def attend_pages(
    q: torch.Tensor,  # [num_tokens, num_heads, head_dim_k]
    keys: KeySource,
    cu_seqlens_q: torch.Tensor,  # int32 [num_seqs + 1]
    *,
    causal: bool,
    window: int | None,
    scale: float,
    new: NewKeys | None = None,  # written to the pages first
) -> AttentionState:
    """The state of every query; rows of no sequence are empty."""
    found = find_keys(keys)
    stores = (found.k, found.v)
    if new is not None and any(store.format != PLAIN for store in stores):
        append_kv(stores, (new.k, new.v), new.slot_mapping, new.saturated)
        new = None
    num_tokens, num_heads = q.shape[:2]
    num_splits = select_splits(found, cu_seqlens_q, num_heads)
    out = q.new_zeros(num_splits, num_tokens, num_heads, keys.head_dim_v)
    lse = q.new_full((num_splits, num_tokens, num_heads), -torch.inf)
    limit = NO_WINDOW if window is None else window
    sizes = attention_sizes(q, found, new, num_splits, limit, causal=causal)
    status = native().attend_pages(
        *(each.data_ptr() for each in (q, found.k.ptr, found.v.ptr)),
        *(None if each.scales is None else each.scales.ptr.data_ptr() for each in stores),
        _levels().data_ptr(),
        *(each.data_ptr() for each in (found.page_table, found.seq_lens, cu_seqlens_q)),
        *((None, None, None) if new is None else (each.data_ptr() for each in new[:3])),
        out.data_ptr(),
        lse.data_ptr(),
        (ctypes.c_int64 * len(sizes))(*sizes),
        scale,
        torch.get_num_threads(),
    )
    check_status(status, q, found, cu_seqlens_q)
    states = AttentionState(out, lse)
    return AttentionState(out[0], lse[0]) if num_splits == 1 else merge_stacked(states)


def attention_sizes(
    q: torch.Tensor,
    keys: StoredKeys,
    new: NewKeys | None,
    num_splits: int,
    window: int,
    *,
    causal: bool,
) -> tuple[int, ...]:
    """Strides and sizes in the order in which the kernel reads them."""
    num_tokens, num_heads, dim_k = q.shape
    num_kv_heads, dim_v = keys.source.num_kv_heads, keys.source.head_dim_v
    k, v, table = keys.k, keys.v, keys.page_table
    return (
        *(*q.stride()[:2], k.page, k.key, k.head, v.page, v.key, v.head),
        *(len(keys.seq_lens), num_tokens, num_kv_heads, num_heads // num_kv_heads, dim_k, dim_v),
        *(keys.num_rows, table.shape[1], table.stride(0), keys.page_size, keys.page_step),
        *(num_splits, window, causal),
        *((0, 0, 0, 0) if new is None else (*new.k.stride()[:2], *new.v.stride()[:2])),
        *(size for store in (k, v) for size in _format_sizes(store)),
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


def check_status(
    status: int, q: torch.Tensor, keys: StoredKeys, cu_seqlens_q: torch.Tensor
) -> None:
    """Raise an IndexError for what the kernel refused, in the words of `attend(check=True)`."""
    if status > 0:
        try:
            Queries(q, cu_seqlens_q, 0, len(keys.seq_lens)).check_content()
            keys.source.check_content()
        except ValueError as error:
            raise IndexError(str(error)) from None
        raise AssertionError(f"sequence {status - 1} was refused")
    if status < 0:
        slots = keys.num_rows
        raise IndexError(f"token {-status - 1} has a slot outside the {slots} of the cache")


def select_splits(keys: StoredKeys, cu_seqlens_q: torch.Tensor, num_heads: int) -> int:
    """Into how many parts the kernel cuts keys, each with states of its own."""
    num_kv_heads = keys.source.num_kv_heads
    return native().select_splits(
        keys.seq_lens.data_ptr(),
        cu_seqlens_q.data_ptr(),
        len(keys.seq_lens),
        num_kv_heads,
        num_heads // num_kv_heads,
        torch.get_num_threads(),
    )
