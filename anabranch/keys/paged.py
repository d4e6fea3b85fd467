"""Keys and values in pages that a table lists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from anabranch.keys.columns import (
    KeyColumns,
    PagedColumns,
    ScatteredColumns,
    ViewedColumns,
    is_flat,
    last_positions,
)
from anabranch.keys.pair import KeysAndValues, check_index, check_pair
from anabranch.keys.source import KeyLengths
from anabranch.keys.view import KeyView, store_of
from anabranch.shapes import read_index


@dataclass(frozen=True, slots=True)
class PagedKV(KeysAndValues):
    """Pages and a table; key p of sequence i is row `p % page_size` of page `p // page_size` of it.

    The caches may have any strides, so a `[pages, heads, page_size, dim]` layout or a packed K|V
    cache comes in as a view.
    """

    kind: ClassVar[str] = "paged"
    k: torch.Tensor  # [num_pages, page_size, num_kv_heads, head_dim_k]
    v: torch.Tensor  # [num_pages, page_size, num_kv_heads, head_dim_v]
    page_table: torch.Tensor  # int32 [num_seqs, max_pages]
    seq_lens: torch.Tensor  # int32 [num_seqs]

    def __post_init__(self) -> None:
        sizes = check_pair(self.k, self.v, "num_pages page_size")
        check_index("page_table", self.page_table, self.k.device)
        check_index("seq_lens", self.seq_lens, self.k.device)
        if not self.page_size:
            raise ValueError(f"a page must hold at least one key, got k {tuple(self.k.shape)}")
        sizes.match("page_table", self.page_table, "num_seqs max_pages")
        sizes.match("seq_lens", self.seq_lens, "num_seqs")

    @property
    def num_seqs(self) -> int:
        """How many sequences the table describes."""
        return self.page_table.shape[0]

    @property
    def page_size(self) -> int:
        """Keys in one page."""
        return self.k.shape[1]

    @property
    def capacity(self) -> int:
        """What a row of the table can list."""
        return self.page_table.shape[1] * self.k.shape[1]

    @property
    def lengths(self) -> KeyLengths:
        """`seq_lens`."""
        return KeyLengths(seq_lens=self.seq_lens)

    @property
    def is_contiguous(self) -> bool:
        """Pages may lie anywhere."""
        return False

    def view(self) -> KeyView:
        """Both caches, and the table."""
        return KeyView(store_of(self.k), store_of(self.v), self.page_table, self.k.shape[1])

    def tensors(self) -> dict[str, torch.Tensor]:
        """Both caches, table and lengths."""
        pair = {"k": self.k, "v": self.v}
        return pair | {"page_table": self.page_table, "seq_lens": self.seq_lens}

    def gather(self, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy of the keys and values of one sequence."""
        positions = torch.arange(int(self.seq_lens[seq]), device=self.k.device)
        pages = self.page_table[seq][positions // self.page_size].long()
        rows = positions % self.page_size
        return self.k[pages, rows], self.v[pages, rows]

    def columns(
        self, seqs: list[int], lens: list[int], k_len: int, starts: torch.Tensor | None
    ) -> KeyColumns:
        """One sequence is read page by page, several row by row."""
        if len(seqs) == 1:
            return self._columns_of_one(seqs[0], lens[0] - k_len, lens[0])
        rows = last_positions(lens, k_len, starts)
        table = self.page_table.index_select(0, torch.tensor(seqs))
        pages = table.gather(1, rows // self.page_size)
        return ScatteredColumns(self.k, self.v, pages, rows % self.page_size)

    def _columns_of_one(self, seq: int, start: int, stop: int) -> KeyColumns:
        """Positions `start` to `stop`; pages in ascending order are read in place."""
        skipped = start // self.page_size
        pages = self.page_table[seq, skipped : -(-stop // self.page_size)]
        row = start - skipped * self.page_size
        listed = read_index(pages)
        if is_flat(self.k) and is_flat(self.v) and listed == [*range(listed[0], listed[-1] + 1)]:
            row += listed[0] * self.page_size
            rows = slice(row, row + stop - start)
            return ViewedColumns(self.k.flatten(0, 1)[None, rows], self.v.flatten(0, 1)[None, rows])
        return PagedColumns(self.k, self.v, pages, row)

    def check_sequence(self, seq: int, length: int) -> None:
        """Validate the pages that a sequence of this length uses."""
        if not length:
            return
        pages = self.page_table[seq, : -(-length // self.page_size)]
        low, high = int(pages.min()), int(pages.max())
        if low < 0 or high >= self.k.shape[0]:
            raise ValueError(
                f"sequence {seq} has page {low if low < 0 else high}, "
                f"but there are {self.k.shape[0]} pages"
            )
