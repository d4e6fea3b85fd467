"""Which leading pages neighbours in a batch share, level by level.

Neighbours form a group at a level if they share more pages than the level above has looked at, and
the group's span ends where two of its neighbours part. Every sequence finds its own groups, from
how many pages each neighbour has in common with the one before it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from anabranch.launches.recorder import launch


def share_pages(
    page_table: torch.Tensor,  # int32 [num_seqs, max_pages]
    seq_lens: torch.Tensor,  # int32 [num_seqs]
    starts: torch.Tensor,  # int32 [num_seqs + 1], of queries
    *,
    num_tokens: int,
    page_size: int,
    levels: int,
    min_saved_keys: int,
    min_total_keys: int,
) -> tuple[torch.Tensor, ...]:
    num_seqs, max_pages = page_table.shape
    num_spans = levels * (num_seqs + 1)
    common, cu_seqlens, spans, rest_lens = (
        torch.empty(size, dtype=torch.int32, device=page_table.device)
        for size in (num_seqs, num_spans + 1, num_spans, num_seqs)
    )
    table, rest_table = (page_table.new_empty(rows, max_pages) for rows in (num_spans, num_seqs))
    lengths = (page_table, page_table.stride(0), seq_lens, starts, num_seqs, max_pages)
    if num_seqs:
        options = {"PAGE_SIZE": page_size, "num_warps": 4}
        launch(common_pages_kernel, (num_seqs,), *lengths, common, **options)
    spans_out, rest_out = (cu_seqlens, table, spans), (rest_table, rest_lens)
    limits = num_tokens, min_saved_keys, min_total_keys
    launch(
        share_pages_kernel,
        (num_seqs + 1,),
        *lengths,
        common,
        spans_out,
        rest_out,
        *limits,
        PAGE_SIZE=page_size,
        LEVELS=levels,
        num_warps=4,
    )
    return cu_seqlens, table, spans, rest_table, rest_lens


@triton.jit
def num_keys(seq, seq_lens_ptr, max_pages, PAGE_SIZE: tl.constexpr):
    """Keys of a sequence, no more than its row of the table lists."""
    return tl.minimum(tl.maximum(tl.load(seq_lens_ptr + seq), 0), max_pages * PAGE_SIZE)


@triton.jit
def whole_pages(seq, seq_lens_ptr, starts_ptr, max_pages, PAGE_SIZE: tl.constexpr):
    """Whole pages of a sequence before its queries."""
    q_len = tl.load(starts_ptr + seq + 1) - tl.load(starts_ptr + seq)
    keys = num_keys(seq, seq_lens_ptr, max_pages, PAGE_SIZE)
    return tl.maximum(keys - q_len, 0) // PAGE_SIZE


@triton.jit(do_not_specialize=["num_seqs", "max_pages"])
def common_pages_kernel(
    table_ptr,  # [num_seqs, max_pages]
    table_stride,
    seq_lens_ptr,  # [num_seqs]
    starts_ptr,  # [num_seqs + 1]
    num_seqs,
    max_pages,
    common_ptr,  # [num_seqs], written
    PAGE_SIZE: tl.constexpr,
    CHUNK: tl.constexpr = 256,
):
    """How many leading pages a sequence has in common with the one before it."""
    seq = tl.program_id(0)
    before = tl.maximum(seq - 1, 0)
    limit = tl.minimum(
        whole_pages(seq, seq_lens_ptr, starts_ptr, max_pages, PAGE_SIZE),
        whole_pages(before, seq_lens_ptr, starts_ptr, max_pages, PAGE_SIZE),
    )
    limit = tl.where(seq > 0, limit, 0)
    mine_ptr = table_ptr + seq.to(tl.int64) * table_stride
    other_ptr = table_ptr + before.to(tl.int64) * table_stride
    start = 0
    while start < limit:
        pages = start + tl.arange(0, CHUNK)
        inside = pages < limit
        mine = tl.load(mine_ptr + pages, inside, other=0)
        other = tl.load(other_ptr + pages, inside, other=0)
        limit = tl.minimum(limit, tl.min(tl.where(inside & (mine != other), pages, limit)))
        start += CHUNK
    tl.store(common_ptr + seq, limit)


@triton.jit
def num_common(common_ptr, num_seqs, CHUNK: tl.constexpr):
    """How many reads of a page are saved if every page of the prefix tree is read once (int64)."""
    total = tl.zeros([CHUNK], tl.int64)
    for start in range(0, num_seqs, CHUNK):
        seqs = start + tl.arange(0, CHUNK)
        total += tl.load(common_ptr + seqs, seqs < num_seqs, other=0)
    return tl.sum(total, 0)


@triton.jit
def group_of(seq, depth, common_ptr, num_seqs, CHUNK: tl.constexpr):
    """The neighbours [left, right) that share more than `depth` pages, and how many they share."""
    left = 0
    right = num_seqs
    for start in range(0, num_seqs, CHUNK):
        others = start + tl.arange(0, CHUNK)
        inside = others < num_seqs
        parted = inside & (tl.load(common_ptr + others, inside, other=0) <= depth)
        left = tl.maximum(left, tl.max(tl.where(parted & (others <= seq), others, 0)))
        right = tl.minimum(right, tl.min(tl.where(parted & (others > seq), others, num_seqs)))
    end = 2147483647
    for start in range(left + 1, right, CHUNK):
        others = start + tl.arange(0, CHUNK)
        inside = others < right
        end = tl.minimum(end, tl.min(tl.load(common_ptr + others, inside, other=2147483647)))
    return left, right, tl.where(right - left > 1, end, depth)


@triton.jit
def copy_pages(source_ptr, target_ptr, count, CHUNK: tl.constexpr):
    """Copy the first `count` entries of a row."""
    for start in range(0, count, CHUNK):
        pages = start + tl.arange(0, CHUNK)
        tl.store(target_ptr + pages, tl.load(source_ptr + pages, pages < count), pages < count)


@triton.jit(
    do_not_specialize=["num_seqs", "max_pages", "num_tokens", "min_saved_keys", "min_total_keys"]
)
def share_pages_kernel(
    table_ptr,  # [num_seqs, max_pages]
    table_stride,
    seq_lens_ptr,  # [num_seqs]
    starts_ptr,  # [num_seqs + 1]
    num_seqs,
    max_pages,
    common_ptr,  # [num_seqs]
    spans_out,  # written: starts [spans + 1], tables [spans, max_pages], lengths [spans]
    rest_out,  # written: tables [num_seqs, max_pages], lengths [num_seqs]
    num_tokens,
    min_saved_keys,  # by a span,
    min_total_keys,  # and by the batch, if all levels of its prefix tree were shared
    PAGE_SIZE: tl.constexpr,
    LEVELS: tl.constexpr,
    CHUNK: tl.constexpr = 256,
):
    """The LEVELS spans of one sequence; sequence num_seqs stands for orphan tokens."""
    cu_seqlens_ptr, spans_table_ptr, spans_ptr = spans_out
    rest_table_ptr, rest_lens_ptr = rest_out
    seq = tl.program_id(0)
    row_ptr = table_ptr + seq.to(tl.int64) * table_stride
    owned = seq < num_seqs
    enough = num_common(common_ptr, num_seqs, CHUNK) * PAGE_SIZE >= min_total_keys
    depth = 0  # pages that the levels above have looked at,
    covered = 0  # and those that are attended to there
    for level in tl.static_range(LEVELS):
        span = level * (num_seqs + 1) + seq
        left, right, end = group_of(seq, depth, common_ptr, num_seqs, CHUNK)
        others = right - left - 1
        saved = (end - covered).to(tl.int64) * (PAGE_SIZE * others)
        pays = owned & enough & (others > 0) & (saved >= min_saved_keys)
        is_first = owned & (left == seq)
        token = tl.load(starts_ptr + tl.where(is_first | (seq == num_seqs), seq, right))
        tl.store(cu_seqlens_ptr + span, level * num_tokens + token)
        tl.store(spans_ptr + span, tl.where(is_first & pays, (end - covered) * PAGE_SIZE, 0))
        if is_first & pays:
            target_ptr = spans_table_ptr + span.to(tl.int64) * max_pages
            copy_pages(row_ptr + covered, target_ptr, end - covered, CHUNK)
        covered = tl.where(pays, end, covered)
        depth = end
    if owned:
        keys = num_keys(seq, seq_lens_ptr, max_pages, PAGE_SIZE)
        tl.store(rest_lens_ptr + seq, keys - covered * PAGE_SIZE)
        target_ptr = rest_table_ptr + seq.to(tl.int64) * max_pages
        copy_pages(row_ptr + covered, target_ptr, tl.cdiv(keys, PAGE_SIZE) - covered, CHUNK)
    else:
        tl.store(cu_seqlens_ptr + LEVELS * (num_seqs + 1), LEVELS * num_tokens)
