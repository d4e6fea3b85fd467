"""Write new tokens into a paged cache: each program moves a tile of rows (token, kv head)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from anabranch.kernels.config import select_merge
from anabranch.kernels.triton.addressing import Rows, store_arguments
from anabranch.kernels.triton.runtime import device_refusal
from anabranch.keys import store_of


def refusal(device: torch.device) -> str | None:
    """Why keys on a device cannot be written; None if they can."""
    return device_refusal(device)


def append_kv(
    k_cache: torch.Tensor,  # [num_pages, page_size, num_kv_heads, head_dim_k]
    v_cache: torch.Tensor,  # [num_pages, page_size, num_kv_heads, head_dim_v]
    k: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim_k]
    v: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim_v]
    slot_mapping: torch.Tensor,  # integer [num_tokens], page * page_size + row; negative = skip
) -> None:
    """Write each token to its slot, in place."""
    num_tokens, num_heads, head_dim_k = k.shape
    head_dim_v = v.shape[-1]
    config = select_merge(max(head_dim_k, head_dim_v))  # rows are moved as a merge moves them
    append_kv_kernel[triton.cdiv(num_tokens * num_heads, config.block_rows),](
        Rows(k, *k.stride()),
        Rows(v, *v.stride()),
        store_arguments(store_of(k_cache)),
        store_arguments(store_of(v_cache)),
        slot_mapping,
        slot_mapping.stride(0),
        num_tokens * num_heads,
        NUM_HEADS=num_heads,
        PAGE_SIZE=k_cache.shape[1],
        HEAD_DIM_K=head_dim_k,
        HEAD_DIM_V=head_dim_v,
        BLOCK_ROWS=config.block_rows,
        BLOCK_DK=triton.next_power_of_2(head_dim_k),
        BLOCK_DV=triton.next_power_of_2(head_dim_v),
        num_warps=config.num_warps,
    )


@triton.jit
def move_rows(source, cache, tokens, pages, keys, heads, row_mask, DIM, BLOCK_D: tl.constexpr):
    """Copy rows of `source` [tokens, heads, dims] to their places in `cache`."""
    dims = tl.arange(0, BLOCK_D)
    mask = row_mask[:, None] & (dims < DIM)[None, :]
    offsets = tokens * source.token + heads * source.head
    rows = tl.load(source.ptr + offsets[:, None] + (dims * source.dim)[None, :], mask)
    offsets = pages * cache.page + keys * cache.key + heads * cache.head
    tl.store(cache.ptr + offsets[:, None] + (dims * cache.dim)[None, :], rows, mask)


@triton.jit(do_not_specialize=["num_rows"])
def append_kv_kernel(
    k,  # Rows [num_tokens, num_kv_heads, head_dim_k]
    v,  # Rows [num_tokens, num_kv_heads, head_dim_v]
    k_cache,  # StoreArguments [num_pages, page_size, num_kv_heads, head_dim_k]
    v_cache,  # StoreArguments [num_pages, page_size, num_kv_heads, head_dim_v]
    slots_ptr,  # [num_tokens]
    slots_stride,
    num_rows,  # num_tokens * num_kv_heads
    NUM_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM_K: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DK: tl.constexpr,  # the powers of two that hold the head dims
    BLOCK_DV: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    tokens, heads = rows // NUM_HEADS, rows % NUM_HEADS
    slots = tl.load(slots_ptr + tokens * slots_stride, rows < num_rows, other=-1).to(tl.int64)
    kept = slots >= 0
    pages, keys = slots // PAGE_SIZE, slots % PAGE_SIZE
    move_rows(k, k_cache, tokens, pages, keys, heads, kept, HEAD_DIM_K, BLOCK_DK)
    move_rows(v, v_cache, tokens, pages, keys, heads, kept, HEAD_DIM_V, BLOCK_DV)
