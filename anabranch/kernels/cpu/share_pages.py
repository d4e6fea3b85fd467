"""Which leading pages neighbours in a batch share, on a CPU."""

from __future__ import annotations

from itertools import pairwise

import torch


def share_pages(
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    starts: torch.Tensor,
    *,
    num_tokens: int,
    page_size: int,
    levels: int,
    min_saved_keys: int,
    min_total_keys: int,
) -> tuple[torch.Tensor, ...]:
    num_seqs, max_pages = page_table.shape
    lens = seq_lens.clamp(0, max_pages * page_size).tolist()
    bounds = starts.tolist()
    common = _common_pages(page_table.tolist(), lens, bounds, page_size)
    enough = sum(common) * page_size >= min_total_keys
    table = page_table.new_zeros(levels * (num_seqs + 1), max_pages)
    rest_table = page_table.new_zeros(num_seqs, max_pages)
    cu_seqlens, spans, covered, depths = [], [], [0] * num_seqs, [0] * num_seqs
    for level in range(levels):
        for left, right in _groups(common, depths):
            size, start = right - left, covered[left]
            end = min(common[left + 1 : right], default=depths[left])
            saved = (end - start) * page_size * (size - 1)
            pays = enough and size > 1 and saved >= min_saved_keys
            if pays:
                row = level * (num_seqs + 1) + left
                table[row, : end - start] = page_table[left, start:end]
                covered[left:right] = [end] * size
            depths[left:right] = [end] * size
            spans += [(end - start) * page_size if pays else 0, *[0] * (size - 1)]
            edges = [bounds[left], *[bounds[right]] * (size - 1)]
            cu_seqlens += [level * num_tokens + edge for edge in edges]
        spans.append(0)
        cu_seqlens.append(level * num_tokens + bounds[-1])
    for seq, start in enumerate(covered):
        rest_table[seq, : max_pages - start] = page_table[seq, start:]
    rest = [length - start * page_size for length, start in zip(lens, covered, strict=True)]
    cu_seqlens.append(levels * num_tokens)
    cu, spanned, left_over = (starts.new_tensor(x) for x in (cu_seqlens, spans, rest))
    return cu, table, spanned, rest_table, left_over


def _common_pages(
    table: list[list[int]], lens: list[int], bounds: list[int], page_size: int
) -> list[int]:
    """Whole pages before the queries that each sequence shares with the one before it."""
    whole = [
        max(length - (stop - start), 0) // page_size
        for length, (start, stop) in zip(lens, pairwise(bounds), strict=True)
    ]
    common = [0] * len(table)
    for seq in range(1, len(table)):
        limit = min(whole[seq - 1], whole[seq])
        while common[seq] < limit and table[seq][common[seq]] == table[seq - 1][common[seq]]:
            common[seq] += 1
    return common


def _groups(common: list[int], depths: list[int]) -> list[tuple[int, int]]:
    """Neighbours that share more than what is looked at already."""
    edges = [seq for seq in range(len(common)) if not seq or common[seq] <= depths[seq]]
    return [*pairwise([*edges, len(common)])]
