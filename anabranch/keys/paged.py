"""Keys and values in pages that a table lists."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from anabranch.keys.columns import (
    DecodedColumns,
    KeyColumns,
    PagedColumns,
    ScatteredColumns,
    ViewedColumns,
    is_flat,
    last_positions,
)
from anabranch.keys.formats import encoded_store, rows_of
from anabranch.keys.source import (
    Identity,
    KeyLengths,
    KeysAndValues,
    KeySource,
    check_index,
    check_pair,
)
from anabranch.keys.view import KeyStore, KeyView, store_of
from anabranch.shapes import FLOATS, Sizes, check_device, check_dtype, read_index


class PagedSource(KeySource):
    """A source with the fields `page_table` and `seq_lens`."""

    __slots__ = ()
    page_table: torch.Tensor  # int32 [num_seqs, max_pages]
    seq_lens: torch.Tensor  # int32 [num_seqs]

    @property
    def num_pages(self) -> int:
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
        return KeyLengths(seq_lens=self.seq_lens)

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


@dataclass(frozen=True, slots=True)
class PagedKV(KeysAndValues, PagedSource):
    """Pages and a table; key p of sequence i is row `p % page_size` of page `p // page_size` of it.

    The caches may have any strides, so a `[pages, heads, page_size, dim]` layout or a packed K|V
    cache comes in as a view. A cache of int8 or float8_e4m3fn has scales, and their shape says
    which format it is (docs/quantised.md); keys and values may differ in format.
    """

    kind: ClassVar[str] = "paged"
    k: torch.Tensor  # [num_pages, page_size, num_kv_heads, head_dim_k]
    v: torch.Tensor  # [num_pages, page_size, num_kv_heads, head_dim_v]
    page_table: torch.Tensor  # int32 [num_seqs, max_pages]
    seq_lens: torch.Tensor  # int32 [num_seqs]
    k_scales: torch.Tensor | None = None
    v_scales: torch.Tensor | None = None
    query_dtype: torch.dtype | None = None  # needed where neither cache has it
    identity: Identity | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        tensors = (self.k, self.v, self.page_table, self.seq_lens, self.k_scales, self.v_scales)
        self.identify(tensors, self.query_dtype)

    def check(self) -> None:
        """Caches, table, lengths and scales."""
        if self._is_plain:
            sizes = check_pair(self.k, self.v, "num_pages page_size")
        else:
            sizes = Sizes()
            sizes.match("k", self.k, "num_pages page_size num_kv_heads head_dim_k")
            sizes.match("v", self.v, "num_pages page_size num_kv_heads head_dim_v")
            check_device("v", self.v, self.k.device)
            self.stores()
        if not self._is_plain or self.query_dtype is not None:
            query_dtype_of(self.query_dtype, {"k": self.k, "v": self.v})
        self.check_table("k", self.k, sizes)

    @property
    def _is_plain(self) -> bool:
        stored_plain = self.k.dtype in FLOATS and self.v.dtype in FLOATS
        return stored_plain and self.k_scales is None and self.v_scales is None

    @property
    def num_pages(self) -> int:
        return self.k.shape[0]

    @property
    def page_size(self) -> int:
        return self.k.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.query_dtype or (self.k if self.k.dtype in FLOATS else self.v).dtype

    def stores(self) -> tuple[KeyStore, ...]:
        if self._is_plain:
            return store_of(self.k), store_of(self.v)
        return (
            encoded_store("k", self.k, self.k_scales),
            encoded_store("v", self.v, self.v_scales),
        )

    def view(self) -> KeyView:
        """Both caches, and the table."""
        k, v = self.stores()
        return KeyView(k, v, self.page_table, self.k.shape[1])

    def tensors(self) -> dict[str, torch.Tensor]:
        """Both caches, table, lengths and, where there are any, scales."""
        tensors = {"k": self.k, "v": self.v}
        tensors |= {"page_table": self.page_table, "seq_lens": self.seq_lens}
        if self.k_scales is not None:
            tensors["k_scales"] = self.k_scales
        if self.v_scales is not None:
            tensors["v_scales"] = self.v_scales
        return tensors

    def static(self) -> list[int]:
        """Which scales there are, and the dtype of queries."""
        scaled = [self.k_scales is not None, self.v_scales is not None]
        return [*map(int, scaled), FLOATS.index(self.dtype)]

    @classmethod
    def rebuild(cls, tensors: list[torch.Tensor], static: list[int]) -> PagedKV:
        """Scales come after the other tensors, in the order of their fields."""
        k_scaled, v_scaled, dtype = static
        return cls(
            *tensors[:4],
            k_scales=tensors[4] if k_scaled else None,
            v_scales=tensors[-1] if v_scaled else None,
            query_dtype=FLOATS[dtype],
        )

    def new_rows(self, k: torch.Tensor, v: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Keys and values [num_tokens, num_kv_heads, dim]."""
        if v is None:
            raise ValueError("v must be given: PagedKV keeps values apart from keys")
        sizes = Sizes()
        sizes.match("keys.k", self.k, "num_pages page_size num_kv_heads head_dim_k")
        sizes.match("keys.v", self.v, "num_pages page_size num_kv_heads head_dim_v")
        sizes.match("k", k, "num_tokens num_kv_heads head_dim_k")
        sizes.match("v", v, "num_tokens num_kv_heads head_dim_v")
        for name, new in (("k", k), ("v", v)):
            check_dtype(name, new, (self.dtype,))
            check_device(name, new, self.device)
        return k, v

    def gather(self, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy of the keys and values of one sequence; decoded ones are float32."""
        pages, rows = self.places(seq)
        if self._is_plain:
            return self.k[pages, rows], self.v[pages, rows]
        k, v = (rows_of(store).read(pages, rows, torch.float32) for store in self.stores())
        return k, v

    def columns(
        self, seqs: list[int], lens: list[int], k_len: int, starts: torch.Tensor | None
    ) -> KeyColumns:
        """One plain sequence is read page by page, all else row by row."""
        if len(seqs) == 1 and self._is_plain:
            return self._columns_of_one(seqs[0], lens[0] - k_len, lens[0])
        pages, rows = self.last_places(seqs, lens, k_len, starts)
        if self._is_plain:
            return ScatteredColumns(self.k, self.v, pages, rows)
        k, v = map(rows_of, self.stores())
        return DecodedColumns(k, v, self.head_dim_v, pages, rows, self.dtype)

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
