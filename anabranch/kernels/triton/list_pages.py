"""Lists of keys as a table of pages of one key, so that attention reads them as any sequence."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from anabranch.keys import KeyLists
from anabranch.launches.recorder import launch

BLOCK = 256  # keys of a list that one program finds


def list_pages(lists: KeyLists) -> torch.Tensor:
    """The table int32 [num_lists, width]; places after a list's count are not written."""
    num_lists, width = lists.indices.shape
    table = torch.empty((num_lists, width), dtype=torch.int32, device=lists.indices.device)
    if not table.numel():
        return table
    pages = lists.page_table
    launch(
        list_pages_kernel,
        (num_lists, triton.cdiv(width, BLOCK)),
        table,
        lists.indices,
        lists.indices.stride(0),
        lists.counts,
        lists.seqs,
        pages,
        0 if pages is None else pages.stride(0),
        width,
        lists.tokens_per_seq,
        lists.page_step,
        lists.key_step,
        lists.head_step,
        LISTS_PER_TOKEN=lists.lists_per_token,
        NUM_KV_HEADS=lists.num_kv_heads,
        PAGE_SIZE=lists.page_size,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return table


@triton.jit(do_not_specialize=["width", "tokens_per_seq"])
def list_pages_kernel(
    table_ptr,  # [num_lists, width]
    indices_ptr,  # [num_lists, width]
    indices_stride,
    counts_ptr,  # [num_lists]
    seqs_ptr,  # [num_tokens] or None
    pages_ptr,  # [num_seqs, max_pages] or None
    pages_stride,
    width,
    tokens_per_seq,
    page_step,
    key_step,
    head_step,
    LISTS_PER_TOKEN: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find a block of the keys of one list."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    listed = places < tl.minimum(tl.load(counts_ptr + row), width)
    token = row // LISTS_PER_TOKEN
    kv_head = row % LISTS_PER_TOKEN * NUM_KV_HEADS // LISTS_PER_TOKEN
    if seqs_ptr is not None:
        seq = tl.load(seqs_ptr + token).to(tl.int64)
    else:
        seq = token // tokens_per_seq
    keys = tl.load(indices_ptr + row * indices_stride + places, listed, other=0)
    if pages_ptr is not None:
        pages = tl.load(pages_ptr + seq * pages_stride + keys // PAGE_SIZE, listed, other=0)
        keys = keys % PAGE_SIZE
    else:
        pages = seq
    found = pages * page_step + keys.to(tl.int64) * key_step + kv_head * head_step
    tl.store(table_ptr + row * width + places, found.to(tl.int32), listed)
