"""Keys of a paged cache as packed numbers: what prompts over a quantised cache attend to."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from anabranch.device import has_fp8, has_overlap
from anabranch.kernels.config import power_of_two
from anabranch.kernels.load.arguments import store_arguments
from anabranch.kernels.load.codec import LARGEST_HALF, decode_tile
from anabranch.kernels.triton.append_kv import StoredRows
from anabranch.keys import KeyStore
from anabranch.launches.recorder import launch

BLOCK_ELEMENTS = 4096  # of keys, and as many of values, in a program
SPANS: tl.constexpr = tl.constexpr(32)  # looked through at once


def expand_pages(
    stores: tuple[KeyStore, ...],  # keys and values [num_pages, page_size, num_kv_heads, dim]
    page_table: torch.Tensor,  # int32 [num_seqs, max_pages]
    spans: torch.Tensor,  # int32 [3 * num_spans]
    first_head: int,
    k: torch.Tensor,  # [num_keys, num_heads, head_dim_k], contiguous
    v: torch.Tensor,  # [num_keys, num_heads, head_dim_v], contiguous
) -> None:
    """Write the keys of spans one after the other, for the heads from `first_head` on.

    `spans` has where each span ends among the keys, then its sequence, then by how much its keys
    stand further back in that sequence.
    """
    overlap = has_overlap(k.device)
    num_keys, num_heads, head_dim_k = k.shape
    rows_k = StoredRows(head_dim_k, power_of_two(head_dim_k), stores[0].format)
    rows_v = StoredRows(v.shape[2], power_of_two(v.shape[2]), stores[1].format)
    block_rows = max(BLOCK_ELEMENTS // max(rows_k.block, rows_v.block), 1)
    launch(
        expand_pages_kernel,
        (triton.cdiv(num_keys * num_heads, block_rows),),
        *(store_arguments(store, has_fp8(k.device)) for store in stores),
        k,
        v,
        page_table,
        page_table.stride(0),
        spans,
        len(spans) // 3,
        num_keys,
        first_head,
        PAGE_SIZE=stores[0].ptr.shape[1],
        NUM_HEADS=num_heads,
        BLOCK_ROWS=block_rows,
        K=rows_k,
        V=rows_v,
        OVERLAP=overlap,
        num_warps=4,
        **({"launch_pdl": True} if overlap else {}),
    )


@triton.jit
def find_spans(keys, spans_ptr, num_spans):
    """The span of each key: as many end at or before it."""
    found = tl.zeros([keys.shape[0]], tl.int32)
    for first in range(0, num_spans, SPANS):
        places = first + tl.arange(0, SPANS)
        ends = tl.load(spans_ptr + places, places < num_spans, other=2147483647)
        found += tl.sum((ends[None, :] <= keys[:, None]).to(tl.int32), 1)
    return found


@triton.jit
def read_rows(store, place, DTYPE: tl.constexpr, ROWS: tl.constexpr):
    """Rows [rows, dims] of a store, found by page, key and head, as numbers."""
    pages, keys, heads = place
    DIM: tl.constexpr = ROWS.dim
    FORMAT: tl.constexpr = ROWS.format
    dims = tl.arange(0, ROWS.block)
    offsets = pages * store.page + keys * store.key + heads * store.head
    ptrs = store.ptr + offsets[:, None] + (dims * store.dim)[None, :]
    numbers = tl.load(ptrs) if ROWS.block == DIM else tl.load(ptrs, (dims < DIM)[None, :])
    if FORMAT.scaling != "none":
        BLOCKS: tl.constexpr = ROWS.block // FORMAT.block if FORMAT.scaling == "block" else 1
        blocks = tl.arange(0, BLOCKS)
        scale = store.scales
        offsets = pages * scale.page + keys * scale.key + heads * scale.head
        ptrs = scale.ptr + offsets[:, None] + (blocks * scale.block)[None, :]
        if FORMAT.scaling == "block" and ROWS.block > DIM:
            scales = tl.load(ptrs, (blocks < DIM // FORMAT.block)[None, :], other=0.0)
        else:
            scales = tl.load(ptrs)
        numbers = decode_tile(numbers, scales, tl.float32, True)
        if tl.float16 == DTYPE:  # scales of blocks are rounded to float16, some of them up
            numbers = tl.minimum(tl.maximum(numbers, -LARGEST_HALF), LARGEST_HALF)
    return numbers.to(DTYPE)


@triton.jit
def write_rows(ptr, numbers, rows, inside, ROWS: tl.constexpr):
    dims = tl.arange(0, ROWS.block)
    ptrs = ptr + rows.to(tl.int64)[:, None] * ROWS.dim + dims[None, :]
    tl.store(ptrs, numbers, inside[:, None] & (dims < ROWS.dim)[None, :])


@triton.jit(do_not_specialize=["num_spans", "num_keys", "first_head"])
def expand_pages_kernel(
    k_store,  # StoreArguments [num_pages, PAGE_SIZE, num_kv_heads, head_dim_k]
    v_store,  # StoreArguments [num_pages, PAGE_SIZE, num_kv_heads, head_dim_v]
    k_ptr,  # [num_keys, NUM_HEADS, head_dim_k]
    v_ptr,  # [num_keys, NUM_HEADS, head_dim_v]
    table_ptr,  # [num_seqs, max_pages]
    table_stride,
    spans_ptr,  # [3, num_spans]
    num_spans,
    num_keys,
    first_head,
    PAGE_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    K: tl.constexpr,  # StoredRows
    V: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A tile of rows (key, head); rows after the last key read it again."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inside = rows // NUM_HEADS < num_keys
    packed = tl.minimum(rows // NUM_HEADS, num_keys - 1)
    heads = (first_head + rows % NUM_HEADS).to(tl.int64)
    spans = find_spans(packed, spans_ptr, num_spans)
    seqs = tl.load(spans_ptr + num_spans + spans).to(tl.int64)
    keys = packed + tl.load(spans_ptr + 2 * num_spans + spans)
    pages = tl.load(table_ptr + seqs * table_stride + keys // PAGE_SIZE).to(tl.int64)
    place = pages, (keys % PAGE_SIZE).to(tl.int64), heads
    k = read_rows(k_store, place, k_ptr.dtype.element_ty, K)  # both before either is written
    v = read_rows(v_store, place, v_ptr.dtype.element_ty, V)
    write_rows(k_ptr, k, rows, inside, K)
    write_rows(v_ptr, v, rows, inside, V)
