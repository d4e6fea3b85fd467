"""Keys and values of a batch, read by ranges of columns: views where memory allows, else copies."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from anabranch.keys.formats import EncodedRows

Pair = tuple[torch.Tensor, torch.Tensor]  # keys and values, [num_seqs, columns, num_kv_heads, dim]


class KeyColumns(Protocol):
    """Keys of several sequences, side by side: a column holds one key of each."""

    @property
    def copied_bytes(self) -> int:
        """Memory that reading one column of one sequence takes."""
        ...

    def read(self, columns: slice) -> Pair:
        """These columns, [num_seqs, columns, num_kv_heads, dim]."""
        ...


class ViewedColumns(NamedTuple):
    """Equally long sequences, side by side in memory."""

    k: torch.Tensor  # [num_seqs, k_len, num_kv_heads, head_dim_k]
    v: torch.Tensor  # [num_seqs, k_len, num_kv_heads, head_dim_v]

    @property
    def copied_bytes(self) -> int:
        """Nothing is copied."""
        return 0

    def read(self, columns: slice) -> Pair:
        """Views of these columns."""
        if columns == slice(0, self.k.shape[1]):
            return self.k, self.v
        return self.k[:, columns], self.v[:, columns]


class PagedColumns(NamedTuple):
    """One sequence in pages of a cache."""

    k: torch.Tensor  # [num_pages, page_size, num_kv_heads, head_dim_k]
    v: torch.Tensor  # [num_pages, page_size, num_kv_heads, head_dim_v]
    pages: torch.Tensor  # int32 [pages of the sequence]
    row: int  # where column 0 lies in the first page

    @property
    def copied_bytes(self) -> int:
        """A key and a value."""
        return _row_bytes(self.k) + _row_bytes(self.v)

    def read(self, columns: slice) -> Pair:
        """A copy of these columns, page by page."""
        page_size = self.k.shape[1]
        start, stop = columns.start + self.row, columns.stop + self.row
        skipped = start // page_size
        pages = self.pages[skipped : -(-stop // page_size)]
        rows = slice(start - skipped * page_size, stop - skipped * page_size)
        k, v = _copy_rows(self.k, self.v, pages)
        return k.flatten(0, 1)[None, rows], v.flatten(0, 1)[None, rows]


class DecodedColumns(NamedTuple):
    """Sequences or lists of keys in any format, each column somewhere else, as plain numbers."""

    k: EncodedRows
    v: EncodedRows | None  # None: a value is the first columns of its key
    head_dim_v: int
    outer: torch.Tensor  # integer [num_seqs, k_len]
    inner: torch.Tensor  # integer [num_seqs, k_len]
    dtype: torch.dtype  # of the queries
    heads: torch.Tensor | None = None  # int64 [num_seqs]: the one that is read, or all

    @property
    def copied_bytes(self) -> int:
        """A key and a value, decoded."""
        stores = (self.k,) if self.v is None else (self.k, self.v)
        num_heads = self.k.codes.shape[-2] if self.heads is None else 1
        return sum(x.codes.shape[-1] for x in stores) * num_heads * self.dtype.itemsize

    def read(self, columns: slice) -> Pair:
        """A decoded copy of these columns."""
        outer, inner = self.outer[:, columns], self.inner[:, columns]
        heads = None if self.heads is None else self.heads[:, None]
        k = self.k.read(outer, inner, self.dtype, heads)
        if self.v is None:
            return k, k[..., : self.head_dim_v]
        return k, self.v.read(outer, inner, self.dtype, heads)


class ScatteredColumns(NamedTuple):
    """Sequences of a cache or a padded batch, each column somewhere else."""

    k: torch.Tensor  # [outer, inner, num_kv_heads, head_dim_k]
    v: torch.Tensor  # [outer, inner, num_kv_heads, head_dim_v]
    outer: torch.Tensor  # integer [num_seqs, k_len]
    inner: torch.Tensor  # integer [num_seqs, k_len]

    @property
    def copied_bytes(self) -> int:
        """A key and a value."""
        return _row_bytes(self.k) + _row_bytes(self.v)

    def read(self, columns: slice) -> Pair:
        """A copy of these columns, row by row."""
        outer, inner = self.outer[:, columns], self.inner[:, columns]
        if not (is_flat(self.k) and is_flat(self.v)):
            return self.k[outer, inner], self.v[outer, inner]  # any strides, 5 times slower
        rows = (outer * self.k.shape[1] + inner).flatten()
        k, v = _copy_rows(self.k.flatten(0, 1), self.v.flatten(0, 1), rows)
        return k.view(*inner.shape, *k.shape[1:]), v.view(*inner.shape, *v.shape[1:])


def is_flat(x: torch.Tensor) -> bool:
    """Whether the first two dimensions can be one."""
    return x.stride(0) == x.stride(1) * x.shape[1]


def last_positions(lens: list[int], k_len: int, starts: torch.Tensor | None) -> torch.Tensor:
    """The positions [num_seqs, k_len] of the last `k_len` keys of sequences of these lengths.

    Columns before `starts`, which are ignored, repeat a sequence's first key.
    """
    stops = torch.tensor(lens)[:, None]
    positions = stops - k_len + torch.arange(k_len)
    if starts is not None:
        positions = torch.maximum(positions, stops - k_len + starts[:, None])
    return positions


def _row_bytes(x: torch.Tensor) -> int:
    return x.shape[-2] * x.shape[-1] * x.itemsize


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
