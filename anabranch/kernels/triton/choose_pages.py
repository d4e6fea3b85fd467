"""Bounds of pages, and the pages of the largest bounds.

A bound is the least or the largest value of a column of a page's keys. The score of a page is the
sum over columns of max(q * low, q * high), the largest among the heads that share a kv head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from anabranch.kernels.config import power_of_two
from anabranch.launches.recorder import launch

BLOCK = 32  # pages that one program scores
FEW_WARPS = 4096  # pages of a sequence up to which four warps hold all scores


def renew_bounds(
    low: torch.Tensor,  # [num_pages, num_kv_heads, head_dim], contiguous
    high: torch.Tensor,
    k: torch.Tensor,  # [num_pages, page_size, num_kv_heads, head_dim]
    slot_mapping: torch.Tensor,  # int64 [num_tokens]
) -> None:
    """Bounds of the pages that hold these slots, over their rows up to the last of the slots."""
    num_tokens, (_, size, num_kv_heads, dim) = slot_mapping.shape[0], k.shape
    if not num_tokens:
        return
    launch(
        renew_bounds_kernel,
        (num_tokens, num_kv_heads),
        *(low, high, k, *k.stride(), slot_mapping, num_tokens),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=dim,
        PAGE_SIZE=size,
        BLOCK_D=power_of_two(dim),
        BLOCK_N=power_of_two(size),
        num_warps=4,
    )


def choose_pages(
    q: torch.Tensor,  # [num_seqs, num_heads, head_dim]
    low: torch.Tensor,  # [num_pages, num_kv_heads, head_dim], contiguous
    high: torch.Tensor,
    page_table: torch.Tensor,  # int32 [num_seqs, max_pages]
    seq_lens: torch.Tensor,  # int32 [num_seqs]
    *,
    num_chosen: int,
    page_size: int,
    page_step: int,
) -> torch.Tensor:
    """The table int32 [num_seqs * num_kv_heads, num_chosen], of numbers page * step + kv head.

    Places after a sequence's last page are not written.
    """
    (num_seqs, num_heads, dim), num_kv_heads = q.shape, low.shape[1]
    width = page_table.shape[1]
    rows = num_seqs * num_kv_heads
    scores = torch.empty((rows, width), dtype=torch.float32, device=q.device)
    table = torch.empty((rows, min(num_chosen, width)), dtype=torch.int32, device=q.device)
    if not table.numel():
        return table
    pages = page_table, page_table.stride(0), seq_lens
    launch(
        score_pages_kernel,
        (rows, triton.cdiv(width, BLOCK)),
        *(q, q.stride(0), q.stride(1), low, high, *pages, scores, width),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=dim,
        PAGE_SIZE=page_size,
        BLOCK_D=power_of_two(dim),
        BLOCK=BLOCK,
        num_warps=4,
    )
    launch(
        pick_pages_kernel,
        (rows,),
        *(scores, *pages, table, width, table.shape[1], page_step),
        NUM_KV_HEADS=num_kv_heads,
        PAGE_SIZE=page_size,
        BLOCK_P=power_of_two(width),
        num_warps=4 if width <= FEW_WARPS else 16,
    )
    return table


@triton.jit(do_not_specialize=["num_tokens"])
def renew_bounds_kernel(
    low_ptr,  # [num_pages, num_kv_heads, head_dim], written
    high_ptr,
    k_ptr,  # [num_pages, page_size, num_kv_heads, head_dim]
    page_stride,
    key_stride,
    head_stride,
    dim_stride,
    slots_ptr,  # [num_tokens]
    num_tokens,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The page of a token, if the next token lies on another one."""
    token, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots_ptr + token)
    after = tl.load(slots_ptr + token + 1, token + 1 < num_tokens, other=-1)
    page = slot // PAGE_SIZE
    if (slot >= 0) & ((after < 0) | (after // PAGE_SIZE != page)):
        keys, dims = tl.arange(0, BLOCK_N)[:, None], tl.arange(0, BLOCK_D)
        used = (keys <= slot % PAGE_SIZE) & (dims < HEAD_DIM)
        offsets = page.to(tl.int64) * page_stride + keys * key_stride + head * head_stride
        k = tl.load(k_ptr + offsets + dims * dim_stride, used, other=0.0)
        infinity = float("inf")
        at = (page.to(tl.int64) * NUM_KV_HEADS + head) * HEAD_DIM + dims
        low = tl.min(tl.where(used, k.to(tl.float32), infinity), 0)
        high = tl.max(tl.where(used, k.to(tl.float32), -infinity), 0)
        tl.store(low_ptr + at, low.to(low_ptr.dtype.element_ty), dims < HEAD_DIM)
        tl.store(high_ptr + at, high.to(high_ptr.dtype.element_ty), dims < HEAD_DIM)


@triton.jit
def pages_of(seq, seq_lens_ptr, width, PAGE_SIZE: tl.constexpr):
    """Pages that a sequence uses, no more than its row of the table lists."""
    return tl.cdiv(
        tl.minimum(tl.maximum(tl.load(seq_lens_ptr + seq), 0), width * PAGE_SIZE), PAGE_SIZE
    )


@triton.jit(do_not_specialize=["width"])
def score_pages_kernel(
    q_ptr,  # [num_seqs, num_heads, head_dim]
    seq_stride,
    head_stride,
    low_ptr,  # [num_pages, num_kv_heads, head_dim]
    high_ptr,
    table_ptr,  # [num_seqs, width]
    table_stride,
    seq_lens_ptr,  # [num_seqs]
    scores_ptr,  # [num_seqs * num_kv_heads, width], written
    width,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Scores of a block of pages for one kv head; the last page has the largest of all."""
    row = tl.program_id(0).to(tl.int64)
    seq, head = row // NUM_KV_HEADS, row % NUM_KV_HEADS
    num_pages = pages_of(seq, seq_lens_ptr, width, PAGE_SIZE)
    start = tl.program_id(1) * BLOCK
    if start < num_pages:
        places, dims = start + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
        inside = places < num_pages
        pages = tl.load(table_ptr + seq * table_stride + places, inside, other=0).to(tl.int64)
        at = (pages[:, None] * NUM_KV_HEADS + head) * HEAD_DIM + dims
        used = inside[:, None] & (dims < HEAD_DIM)
        low = tl.load(low_ptr + at, used, other=0.0).to(tl.float32)
        high = tl.load(high_ptr + at, used, other=0.0).to(tl.float32)
        best = tl.full((BLOCK,), float("-inf"), tl.float32)
        for member in tl.static_range(GROUP):
            q_offset = seq * seq_stride + (head * GROUP + member) * head_stride
            q = tl.load(q_ptr + q_offset + dims, dims < HEAD_DIM, other=0.0).to(tl.float32)
            best = tl.maximum(best, tl.sum(tl.maximum(q * low, q * high), 1))
        best = tl.where(places == num_pages - 1, float("inf"), best)
        tl.store(scores_ptr + row * width + places, best, inside)


@triton.jit(do_not_specialize=["width", "num_chosen"])
def pick_pages_kernel(
    scores_ptr,  # [num_seqs * num_kv_heads, width]
    table_ptr,  # [num_seqs, width]
    table_stride,
    seq_lens_ptr,  # [num_seqs]
    chosen_ptr,  # [num_seqs * num_kv_heads, num_chosen], written
    width,
    num_chosen,
    page_step,
    NUM_KV_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Pages of the largest scores, in the order of the sequence; of equal ones the first.

    The score of the last page that fits is found by halving the range of scores, whose bits are
    ordered like integers.
    """
    row = tl.program_id(0).to(tl.int64)
    seq, head = row // NUM_KV_HEADS, row % NUM_KV_HEADS
    num_pages = pages_of(seq, seq_lens_ptr, width, PAGE_SIZE)
    places = tl.arange(0, BLOCK_P)
    inside = places < num_pages
    scores = tl.load(scores_ptr + row * width + places, inside, other=float("-inf"))
    bits = scores.to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    low = tl.full((), -2147483648, tl.int64)
    high = tl.full((), 2147483647, tl.int64)
    for _ in range(32):
        middle = low + (high - low + 1) // 2
        enough = tl.sum((inside & (order >= middle.to(tl.int32))).to(tl.int32)) >= num_chosen
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    least = low.to(tl.int32)
    above = inside & (order > least)
    equal = inside & (order == least)
    room = num_chosen - tl.sum(above.to(tl.int32))
    kept = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= room))
    kept = tl.where(num_pages <= num_chosen, inside, kept)
    pages = tl.load(table_ptr + seq * table_stride + places, kept, other=0)
    at = row * num_chosen + tl.cumsum(kept.to(tl.int32), 0) - 1
    tl.store(chosen_ptr + at, (pages * page_step + head).to(tl.int32), kept)
