"""What sources in pages have in common: a table that lists the pages of each sequence."""

from __future__ import annotations

import torch

from anabranch.keys.columns import last_positions
from anabranch.keys.pair import check_index
from anabranch.keys.source import KeyLengths, KeySource
from anabranch.keys.view import KeyStore
from anabranch.shapes import FLOATS, Sizes


class PagedSource(KeySource):
    """A source with the fields `page_table` and `seq_lens`."""

    __slots__ = ()
    page_table: torch.Tensor  # int32 [num_seqs, max_pages]
    seq_lens: torch.Tensor  # int32 [num_seqs]

    @property
    def num_pages(self) -> int:
        """Pages of the cache."""
        raise NotImplementedError

    def stores(self) -> tuple[KeyStore, ...]:
        """What `append_kv` writes: keys and values, or rows that are both."""
        raise NotImplementedError

    def new_rows(self, k: torch.Tensor, v: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """New tokens [num_tokens, num_kv_heads, dim], checked, one tensor for each store."""
        raise NotImplementedError

    @property
    def num_seqs(self) -> int:
        """How many sequences the table describes."""
        return self.page_table.shape[0]

    @property
    def capacity(self) -> int:
        """What a row of the table can list."""
        return self.page_table.shape[1] * self.page_size

    @property
    def lengths(self) -> KeyLengths:
        """`seq_lens`."""
        return KeyLengths(seq_lens=self.seq_lens)

    @property
    def is_contiguous(self) -> bool:
        """Pages may lie anywhere."""
        return False

    def check_table(self, name: str, cache: torch.Tensor, sizes: Sizes) -> None:
        """Refuse a table or lengths that kernels cannot read, and pages of no keys."""
        check_index("page_table", self.page_table, cache.device)
        check_index("seq_lens", self.seq_lens, cache.device)
        if not cache.shape[1]:
            shape = tuple(cache.shape)
            raise ValueError(f"a page must hold at least one key, got {name} {shape}")
        sizes.match("page_table", self.page_table, "num_seqs max_pages")
        sizes.match("seq_lens", self.seq_lens, "num_seqs")

    def places(self, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The page and the row of each key of one sequence."""
        positions = torch.arange(int(self.seq_lens[seq]), device=self.device)
        pages = self.page_table[seq][positions // self.page_size].long()
        return pages, positions % self.page_size

    def last_places(
        self, seqs: list[int], lens: list[int], k_len: int, starts: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pages and rows [num_seqs, k_len] of the last keys of some sequences."""
        rows = last_positions(lens, k_len, starts)
        table = self.page_table.index_select(0, torch.tensor(seqs))
        return table.gather(1, rows // self.page_size), rows % self.page_size

    def check_sequence(self, seq: int, length: int) -> None:
        """Validate the pages that a sequence of this length uses."""
        if not length:
            return
        pages = self.page_table[seq, : -(-length // self.page_size)]
        low, high = int(pages.min()), int(pages.max())
        if low < 0 or high >= self.num_pages:
            raise ValueError(
                f"sequence {seq} has page {low if low < 0 else high}, "
                f"but there are {self.num_pages} pages"
            )


def query_dtype_of(given: torch.dtype | None, caches: dict[str, torch.Tensor]) -> torch.dtype:
    """The dtype of the queries that caches go with: that of plain ones, else the one given."""
    plain = {name: cache.dtype for name, cache in caches.items() if cache.dtype in FLOATS}
    if given is None and not plain:
        stored = next(iter(caches.values())).dtype
        raise ValueError(f"keys of {stored} need query_dtype, the dtype of the queries")
    dtype = given or next(iter(plain.values()))
    if dtype not in FLOATS:
        names = ", ".join(str(x)[6:] for x in FLOATS)
        raise ValueError(f"query_dtype must be one of {names}, got {dtype}")
    for name, stored in plain.items():
        if stored != dtype:
            raise ValueError(f"{name} must be one of {str(dtype)[6:]}, got {stored}")
    return dtype
