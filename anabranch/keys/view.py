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


class KeyLists(NamedTuple):
    """Lists of keys, each of which is a sequence of its own, and where a listed key lies.

    A list names keys of one sequence of another source. In strides of a page of the view, key p of
    sequence i lies at `page * page_step + row * key_step + kv_head * head_step`, with page and row
    from row i of the table. Where keys are quantised, `head_step` is 0 and stores keep their own
    strides of heads: those of scales have no step in common with those of codes.
    """

    indices: torch.Tensor  # int32 [num_lists, width]
    counts: torch.Tensor  # int32 [num_lists]
    seqs: torch.Tensor | None  # int32 [num_tokens]; by default token t reads t // tokens_per_seq
    tokens_per_seq: int
    lists_per_token: int
    num_kv_heads: int  # that lists are divided among; 1 where a list is of all heads
    page_table: torch.Tensor | None  # of the other source; without one a sequence is a page
    page_size: int
    page_step: int
    key_step: int
    head_step: int


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
    lists: KeyLists | None = None  # a producer makes the table from them, with pages of one key
    log_weights: torch.Tensor | None = None  # float32 [rows, keys], added to the logits of keys

    @property
    def is_pages(self) -> bool:
        """Whether keys and values lie in pages that a table lists, and nothing else is read."""
        plain = self.lists is None and self.log_weights is None and not self.values_in_keys
        return plain and self.page_table is not None

    @property
    def is_quantised(self) -> bool:
        """Whether keys or values are codes with scales."""
        return self.k.scales is not None or self.v.scales is not None

    @property
    def is_plain(self) -> bool:
        """Whether keys and values are numbers in places of their own."""
        return not self.is_quantised and not self.values_in_keys
