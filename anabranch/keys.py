"""Where keys and values live: the key sources that `attend` reads.

Frozen data with shapes, dtypes and strides checked when made, never by reading device memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from anabranch.shapes import Sizes, check_device, check_dtype

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def _check_pair(k: torch.Tensor, v: torch.Tensor, rows: str) -> Sizes:
    sizes = Sizes()
    sizes.match("k", k, f"{rows} num_kv_heads head_dim_k")
    sizes.match("v", v, f"{rows} num_kv_heads head_dim_v")
    check_dtype("k", k, FLOATS)
    check_dtype("v", v, (k.dtype,))
    check_device("v", v, k.device)
    return sizes


def _check_index(argument: str, index: torch.Tensor, k: torch.Tensor) -> None:
    check_dtype(argument, index, (torch.int32,))
    check_device(argument, index, k.device)
    if index.dim() and index.shape[-1] > 1 and index.stride(-1) != 1:
        raise ValueError(f"{argument} must be contiguous in its last dimension, "
                         f"got strides {index.stride()}")  # fmt: skip


@dataclass(frozen=True, slots=True)
class DenseKV:
    """A padded batch; sequence i has `seq_lens[i]` keys, or all of them without `seq_lens`."""

    k: torch.Tensor  # [num_seqs, max_len, num_kv_heads, head_dim_k]
    v: torch.Tensor  # [num_seqs, max_len, num_kv_heads, head_dim_v]
    seq_lens: torch.Tensor | None = None  # int32 [num_seqs]

    def __post_init__(self) -> None:
        sizes = _check_pair(self.k, self.v, "num_seqs max_len")
        if self.seq_lens is not None:
            _check_index("seq_lens", self.seq_lens, self.k)
            sizes.match("seq_lens", self.seq_lens, "num_seqs")

    @property
    def num_seqs(self) -> int:
        """How many sequences the batch holds."""
        return self.k.shape[0]


@dataclass(frozen=True, slots=True)
class RaggedKV:
    """Packed sequences; sequence i holds rows `cu_seqlens[i]` to `cu_seqlens[i + 1]`."""

    k: torch.Tensor  # [num_keys, num_kv_heads, head_dim_k]
    v: torch.Tensor  # [num_keys, num_kv_heads, head_dim_v]
    cu_seqlens: torch.Tensor  # int32 [num_seqs + 1]

    def __post_init__(self) -> None:
        _check_pair(self.k, self.v, "num_keys")
        _check_index("cu_seqlens", self.cu_seqlens, self.k)
        if self.cu_seqlens.dim() != 1 or not self.cu_seqlens.shape[0]:
            shape = tuple(self.cu_seqlens.shape)
            raise ValueError(f"cu_seqlens must be [num_seqs + 1], got shape {shape}")

    @property
    def num_seqs(self) -> int:
        """How many sequences are packed."""
        return self.cu_seqlens.shape[0] - 1


@dataclass(frozen=True, slots=True)
class PagedKV:
    """Pages and a table; key p of sequence i is row `p % page_size` of page `p // page_size` of it.

    The caches may have any strides, so a `[pages, heads, page_size, dim]` layout or a packed K|V
    cache comes in as a view.
    """

    k: torch.Tensor  # [num_pages, page_size, num_kv_heads, head_dim_k]
    v: torch.Tensor  # [num_pages, page_size, num_kv_heads, head_dim_v]
    page_table: torch.Tensor  # int32 [num_seqs, max_pages]
    seq_lens: torch.Tensor  # int32 [num_seqs]

    def __post_init__(self) -> None:
        sizes = _check_pair(self.k, self.v, "num_pages page_size")
        for argument in ("page_table", "seq_lens"):
            _check_index(argument, getattr(self, argument), self.k)
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


KeySource = DenseKV | RaggedKV | PagedKV
