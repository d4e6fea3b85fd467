"""Latent keys in pages: one row a token is its key, and the row's first columns are its value."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from anabranch.keys.columns import DecodedColumns, KeyColumns
from anabranch.keys.formats import check_blocks, encoded_store, rows_of
from anabranch.keys.paged import PagedSource, query_dtype_of
from anabranch.keys.source import Identity
from anabranch.keys.view import KeyStore, KeyView
from anabranch.shapes import FLOATS, Sizes, check_device, check_dtype


@dataclass(frozen=True, slots=True)
class LatentKV(PagedSource):
    """Multi-head latent attention's cache, for absorbed queries: one kv head, shared by all heads.

    Row p of sequence i is row `p % page_size` of page `p // page_size` of it. A key is the whole
    row (512 + 64 columns in DeepSeek-V2 and V3), a value its first `head_dim_v` columns (512).
    A cache of int8 or float8_e4m3fn has scales, as PagedKV has them, for one head.
    """

    kind: ClassVar[str] = "latent"
    cache: torch.Tensor  # [num_pages, page_size, head_dim_k]
    page_table: torch.Tensor  # int32 [num_seqs, max_pages]
    seq_lens: torch.Tensor  # int32 [num_seqs]
    head_dim_v: int  # pyright: ignore[reportIncompatibleMethodOverride] (a field that is read)
    cache_scales: torch.Tensor | None = None  # [1], [num_pages, page_size] or with [.., blocks]
    query_dtype: torch.dtype | None = None  # needed where the cache does not have it
    identity: Identity | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        tensors = (self.cache, self.page_table, self.seq_lens, self.cache_scales)
        self.identify(tensors, self.head_dim_v, self.query_dtype)

    def check(self) -> None:
        """Rows, table, lengths and scales."""
        sizes = Sizes()
        sizes.match("cache", self.cache, "num_pages page_size head_dim_k")
        if not 1 <= self.head_dim_v <= self.head_dim_k:
            raise ValueError(
                f"head_dim_v must be from 1 to the {self.head_dim_k} columns of the cache, "
                f"got {self.head_dim_v}"
            )
        (rows,) = self.stores()
        if rows.format.scaling == "block":
            check_blocks("head_dim_v", self.head_dim_v)
        query_dtype_of(self.query_dtype, {"cache": self.cache})
        self.check_table("cache", self.cache, sizes)

    @property
    def num_pages(self) -> int:
        return self.cache.shape[0]

    @property
    def page_size(self) -> int:
        return self.cache.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """All heads of a query read the same row."""
        return 1

    @property
    def head_dim_k(self) -> int:
        return self.cache.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        return self.query_dtype or self.cache.dtype

    @property
    def device(self) -> torch.device:
        return self.cache.device

    def stores(self) -> tuple[KeyStore, ...]:
        scales = self.cache_scales
        if scales is not None and scales.numel() != 1:
            if scales.dim() < 2:
                shape = tuple(scales.shape)
                raise ValueError(f"cache_scales must be [num_pages, page_size, ...], got {shape}")
            scales = scales.unsqueeze(2)
        return (encoded_store("cache", self.cache.unsqueeze(2), scales),)

    def view(self) -> KeyView:
        """The rows as keys, and their first columns as values."""
        (rows,) = self.stores()
        values = rows._replace(ptr=rows.ptr[..., : self.head_dim_v])
        return KeyView(rows, values, self.page_table, self.page_size, values_in_keys=True)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The rows, table, lengths and, where there are any, scales."""
        tensors = {"cache": self.cache, "page_table": self.page_table, "seq_lens": self.seq_lens}
        scales = self.cache_scales
        return tensors if scales is None else tensors | {"cache_scales": scales}

    def static(self) -> list[int]:
        """The width of a value, and the dtype of queries."""
        return [self.head_dim_v, FLOATS.index(self.dtype)]

    @classmethod
    def rebuild(cls, tensors: list[torch.Tensor], static: list[int]) -> LatentKV:
        """Scales come last, if there are any."""
        head_dim_v, dtype = static
        scales = tensors[3] if len(tensors) > 3 else None
        return cls(
            *tensors[:3], head_dim_v=head_dim_v, cache_scales=scales, query_dtype=FLOATS[dtype]
        )

    def new_rows(self, k: torch.Tensor, v: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Rows [num_tokens, head_dim_k], of one head."""
        if v is not None:
            raise ValueError(f"v must be None: a row of LatentKV holds both, got {tuple(v.shape)}")
        sizes = Sizes()
        sizes.match("keys.cache", self.cache, "num_pages page_size head_dim_k")
        sizes.match("k", k, "num_tokens head_dim_k")
        check_dtype("k", k, (self.dtype,))
        check_device("k", k, self.device)
        return (k.unsqueeze(1),)

    def gather(self, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy of the rows of one sequence; decoded ones are float32."""
        pages, rows = self.places(seq)
        dtype = torch.float32 if self.cache_scales is not None else self.dtype
        k = rows_of(*self.stores()).read(pages, rows, dtype)
        return k, k[..., : self.head_dim_v]

    def read_pages(self, seq: int, pages: slice, out: torch.Tensor) -> None:
        """Copy some pages of a sequence, decoded, to `out` [num_pages * page_size, head_dim_k]."""
        numbers = self.page_table[seq, pages].long()
        if self.cache_scales is None:
            rows = out.view(len(numbers), self.page_size, self.head_dim_k)
            torch.index_select(self.cache, 0, numbers, out=rows)
        else:
            inner = torch.arange(self.page_size, device=self.device)
            out.copy_(self.read_slots((numbers[:, None] * self.page_size + inner).flatten()))

    def read_slots(self, slots: torch.Tensor) -> torch.Tensor:
        """A copy of the rows in some slots, [num_rows, head_dim_k], in the dtype of queries."""
        rows = rows_of(*self.stores())
        return rows.read(slots // self.page_size, slots % self.page_size, self.dtype)[:, 0]

    def columns(
        self, seqs: list[int], lens: list[int], k_len: int, starts: torch.Tensor | None
    ) -> KeyColumns:
        """Rows are copied once, wherever they lie."""
        pages, rows = self.last_places(seqs, lens, k_len, starts)
        k = rows_of(*self.stores())
        return DecodedColumns(k, None, self.head_dim_v, pages, rows, self.dtype)
