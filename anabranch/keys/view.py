"""Key sources as kernels see them: stores of keys and values, and the table that finds pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True, slots=True)
class StoreFormat:
    """How the elements of a store are encoded; a compile-time constant of kernels."""

    name: str
    # What one scale covers: "none", "tensor", "key" (a head of one key) or "block" of such a head.
    scaling: str = "none"
    block: int = 0  # elements of a block

    @property
    def is_fp8(self) -> bool:
        """Whether codes are e4m3; those of the other quantised formats are int8."""
        return self.name.startswith("fp8")


PLAIN = StoreFormat("plain")  # elements have the dtype of the queries


class ScaleStore(NamedTuple):
    """Scales [pages, keys, heads, blocks] in memory, and their strides in elements."""

    ptr: torch.Tensor
    page: int
    key: int
    head: int
    block: int


class KeyStore(NamedTuple):
    """Keys or values [pages, keys, heads, dims] in memory, and their strides in elements."""

    ptr: torch.Tensor
    page: int
    key: int
    head: int
    dim: int
    format: StoreFormat  # no default: torch 2.11 cannot trace an object that is one
    scales: ScaleStore | None = None


def store_of(pages: torch.Tensor) -> KeyStore:
    """Plain keys or values in a tensor of four dimensions."""
    page, key, head, dim = pages.stride()
    return KeyStore(pages, page, key, head, dim, PLAIN)


class KeyView(NamedTuple):
    """All that a kernel needs to find the keys of a sequence.

    With a table, a sequence's row of it lists its pages of `page_size` keys. Without one, a
    sequence is one page of contiguous keys: it begins at an *origin*, counted in strides of a page.
    """

    k: KeyStore
    v: KeyStore
    page_table: torch.Tensor | None  # int32 [rows, max_pages]
    page_size: int  # keys between two pages; without a table, between two origins
    values_in_keys: bool = False  # a value is the first head_dim_v columns of its key
