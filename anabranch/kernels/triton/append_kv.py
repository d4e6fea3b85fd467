"""Write new tokens into a paged cache: each program moves a tile of rows (token, kv head)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from anabranch.kernels.config import power_of_two, select_merge
from anabranch.kernels.load.arguments import Rows, store_arguments
from anabranch.kernels.load.codec import encode_rows
from anabranch.keys import KeyStore, StoreFormat
from anabranch.launches.recorder import launch


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows of keys or values, as the kernel is compiled for them."""

    dim: int
    block: int  # the power of two that holds it
    format: StoreFormat


def append_kv(
    stores: tuple[KeyStore, ...],
    new: tuple[torch.Tensor, ...],  # [num_tokens, num_kv_heads, dim] for each store
    slot_mapping: torch.Tensor,  # integer [num_tokens], page * page_size + row; negative = skip
    saturated: torch.Tensor | None,  # int32 [1]
) -> None:
    """Write each token to its slot, in place, and add how many elements saturated."""
    num_tokens, num_heads, _ = new[0].shape
    dims = [rows.shape[-1] for rows in new]
    config = select_merge(max(dims))  # rows are moved as a merge moves them
    rows = [Rows(x, *x.stride()) for x in new]
    launch(
        append_kv_kernel,
        (-(-num_tokens * num_heads // config.block_rows),),
        rows[0],
        rows[1] if len(rows) > 1 else None,
        store_arguments(stores[0]),
        store_arguments(stores[1]) if len(rows) > 1 else None,
        slot_mapping,
        slot_mapping.stride(0),
        num_tokens * num_heads,
        saturated,
        NUM_HEADS=num_heads,
        PAGE_SIZE=stores[0].ptr.shape[1],
        BLOCK_ROWS=config.block_rows,
        K=StoredRows(dims[0], power_of_two(dims[0]), stores[0].format),
        V=StoredRows(dims[-1], power_of_two(dims[-1]), stores[-1].format),
        num_warps=config.num_warps,
    )


@triton.jit
def store_rows(source, store, place, row_mask, saturated_ptr, ROWS: tl.constexpr):
    """Move rows of `source` [tokens, heads, dims] to their places in a store, in its format.

    A place is a token and a head of the source, and a page and a key of the store.
    """
    tokens, heads, pages, keys = place
    DIM: tl.constexpr = ROWS.dim
    FORMAT: tl.constexpr = ROWS.format
    dims = tl.arange(0, ROWS.block)
    mask = row_mask[:, None] & (dims < DIM)[None, :]
    offsets = tokens * source.token + heads * source.head
    ptrs = source.ptr + offsets[:, None] + (dims * source.dim)[None, :]
    if FORMAT.scaling == "none":
        rows = tl.load(ptrs, mask)
    else:
        scale = 0.0  # unused unless the tensor has one
        if FORMAT.scaling == "tensor":
            scale = tl.load(store.scales.ptr)
        rows, scales, beyond = encode_rows(tl.load(ptrs, mask, other=0.0), scale, FORMAT)
        if FORMAT.scaling != "tensor":
            store_scales(scales, store.scales, pages, keys, heads, row_mask, DIM, FORMAT)
        if saturated_ptr is not None:
            tl.atomic_add(saturated_ptr, beyond, beyond > 0, sem="relaxed")
    offsets = pages * store.page + keys * store.key + heads * store.head
    tl.store(store.ptr + offsets[:, None] + (dims * store.dim)[None, :], rows, mask)


@triton.jit
def store_scales(
    scales, store, pages, keys, heads, row_mask, DIM: tl.constexpr, FORMAT: tl.constexpr
):
    """Write the scales [rows, blocks] of rows."""
    NUM_BLOCKS: tl.constexpr = DIM // FORMAT.block if FORMAT.scaling == "block" else 1
    blocks = tl.arange(0, scales.shape[1])
    offsets = pages * store.page + keys * store.key + heads * store.head
    ptrs = store.ptr + offsets[:, None] + (blocks * store.block)[None, :]
    mask = row_mask[:, None] & (blocks < NUM_BLOCKS)[None, :]
    tl.store(ptrs, scales.to(store.ptr.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["num_rows"])
def append_kv_kernel(
    k,  # Rows [num_tokens, num_kv_heads, head_dim_k]
    v,  # Rows [num_tokens, num_kv_heads, head_dim_v], or None
    k_store,  # StoreArguments [num_pages, page_size, num_kv_heads, head_dim_k]
    v_store,  # StoreArguments [num_pages, page_size, num_kv_heads, head_dim_v], or None
    slots_ptr,  # [num_tokens]
    slots_stride,
    num_rows,  # num_tokens * num_kv_heads
    saturated_ptr,  # [1], or None
    NUM_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    K: tl.constexpr,  # StoredRows
    V: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    tokens, heads = rows // NUM_HEADS, rows % NUM_HEADS
    slots = tl.load(slots_ptr + tokens * slots_stride, rows < num_rows, other=-1).to(tl.int64)
    kept = slots >= 0
    pages, keys = slots // PAGE_SIZE, slots % PAGE_SIZE
    place = tokens, heads, pages, keys
    store_rows(k, k_store, place, kept, saturated_ptr, K)
    if v is not None:
        store_rows(v, v_store, place, kept, saturated_ptr, V)
