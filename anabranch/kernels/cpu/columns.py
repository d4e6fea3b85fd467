"""Keys and values of a batch, read by ranges of columns: views where memory allows, else copies."""

from __future__ import annotations

from typing import NamedTuple

import torch

from anabranch.keys import DenseKV, KeySource, PagedKV, RaggedKV

Pair = tuple[torch.Tensor, torch.Tensor]  # keys and values, [num_seqs, columns, num_kv_heads, dim]


class Views(NamedTuple):
    """Equally long sequences, side by side in memory."""

    k: torch.Tensor  # [num_seqs, k_len, num_kv_heads, head_dim_k]
    v: torch.Tensor  # [num_seqs, k_len, num_kv_heads, head_dim_v]

    def read(self, columns: slice) -> Pair:
        """Views of these columns."""
        if columns == slice(0, self.k.shape[1]):
            return self.k, self.v
        return self.k[:, columns], self.v[:, columns]


class Pages(NamedTuple):
    """One sequence in pages of a cache."""

    k: torch.Tensor  # [num_pages, page_size, num_kv_heads, head_dim_k]
    v: torch.Tensor  # [num_pages, page_size, num_kv_heads, head_dim_v]
    pages: torch.Tensor  # int32 [pages of the sequence]
    row: int  # where column 0 lies in the first page

    def read(self, columns: slice) -> Pair:
        """A copy of these columns, page by page."""
        page_size = self.k.shape[1]
        start, stop = columns.start + self.row, columns.stop + self.row
        skipped = start // page_size
        pages = self.pages[skipped : -(-stop // page_size)]
        rows = slice(start - skipped * page_size, stop - skipped * page_size)
        k, v = _copy_rows(self.k, self.v, pages)
        return k.flatten(0, 1)[None, rows], v.flatten(0, 1)[None, rows]


class Rows(NamedTuple):
    """Sequences of a cache or a padded batch, each column somewhere else."""

    k: torch.Tensor  # [outer, inner, num_kv_heads, head_dim_k]
    v: torch.Tensor  # [outer, inner, num_kv_heads, head_dim_v]
    outer: torch.Tensor  # integer [num_seqs, k_len]
    inner: torch.Tensor  # integer [num_seqs, k_len]

    def read(self, columns: slice) -> Pair:
        """A copy of these columns, row by row."""
        outer, inner = self.outer[:, columns], self.inner[:, columns]
        if not (_flat(self.k) and _flat(self.v)):
            return self.k[outer, inner], self.v[outer, inner]  # any strides, 5 times slower
        rows = (outer * self.k.shape[1] + inner).flatten()
        k, v = _copy_rows(self.k.flatten(0, 1), self.v.flatten(0, 1), rows)
        return k.unflatten(0, inner.shape), v.unflatten(0, inner.shape)


def _copy_rows(k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor) -> Pair:
    if k.shape[-1] != v.shape[-1]:
        return k.index_select(0, rows), v.index_select(0, rows)
    # one allocation: freed together, two exceed glibc's trim threshold and are faulted in again
    # at every call (measured: 3.1 ms against 0.3 for 6 MB)
    k_rows, v_rows = k.new_empty(2, len(rows), *k.shape[1:])
    for source, copied in ((k, k_rows), (v, v_rows)):
        if source[:1].is_contiguous():  # rows of one dimension are copied 4 times as fast
            torch.index_select(source.flatten(1), 0, rows, out=copied.flatten(1))
        else:
            torch.index_select(source, 0, rows, out=copied)
    return k_rows, v_rows


def find_columns(
    keys: KeySource, seqs: list[int], lens: list[int], k_len: int, starts: torch.Tensor | None
) -> Views | Pages | Rows:
    """Where the last `k_len` keys of sequences of these lengths lie."""
    if isinstance(keys, PagedKV) and len(seqs) == 1:
        return _pages(keys, seqs[0], lens[0] - k_len, lens[0])
    adjacent = seqs[-1] - seqs[0] == len(seqs) - 1 and min(lens) == max(lens)
    if adjacent and not isinstance(keys, PagedKV):
        return _views(keys, seqs, lens[0], k_len)
    stops = torch.tensor(lens)[:, None]
    inner = stops - k_len + torch.arange(k_len)
    if starts is not None:  # a column to ignore repeats the first key, whatever else lies there
        inner = torch.maximum(inner, stops - k_len + starts[:, None])
    index = torch.tensor(seqs)
    if isinstance(keys, DenseKV):
        return Rows(keys.k, keys.v, index[:, None].expand_as(inner), inner)
    if isinstance(keys, RaggedKV):
        inner += keys.cu_seqlens[index][:, None]
        return Rows(keys.k[None], keys.v[None], torch.zeros_like(inner), inner)
    table = keys.page_table.index_select(0, index)
    pages = table.gather(1, inner // keys.page_size)
    return Rows(keys.k, keys.v, pages, inner % keys.page_size)


def _pages(keys: PagedKV, seq: int, start: int, stop: int) -> Views | Pages:
    """Positions `start` to `stop` of one sequence; pages in ascending order are read in place."""
    skipped = start // keys.page_size
    pages = keys.page_table[seq, skipped : -(-stop // keys.page_size)]
    row = start - skipped * keys.page_size
    listed = pages.tolist()
    if _flat(keys.k) and _flat(keys.v) and listed == [*range(listed[0], listed[-1] + 1)]:
        row += listed[0] * keys.page_size
        rows = slice(row, row + stop - start)
        return Views(keys.k.flatten(0, 1)[None, rows], keys.v.flatten(0, 1)[None, rows])
    return Pages(keys.k, keys.v, pages, row)


def _flat(x: torch.Tensor) -> bool:
    return x.stride(0) == x.stride(1) * x.shape[1]


def _views(keys: DenseKV | RaggedKV, seqs: list[int], length: int, k_len: int) -> Views:
    columns = slice(length - k_len, length)
    if isinstance(keys, DenseKV):
        if (len(seqs), k_len) == keys.k.shape[:2]:
            return Views(keys.k, keys.v)
        some = slice(seqs[0], seqs[-1] + 1)
        return Views(keys.k[some, columns], keys.v[some, columns])
    first = int(keys.cu_seqlens[seqs[0]])
    rows = slice(first, first + len(seqs) * length)
    k, v = (x[rows].unflatten(0, (len(seqs), length)) for x in (keys.k, keys.v))
    return Views(k[:, columns], v[:, columns])
