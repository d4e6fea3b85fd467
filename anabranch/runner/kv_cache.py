"""The tensors of a paged cache: keys and values of every layer."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from anabranch.keys import PagedKV


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps of a token."""

    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Of keys and values together."""
        return self.num_kv_heads * (self.head_dim_k + self.head_dim_v) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Pages of one layer."""

    k: torch.Tensor  # [num_pages, page_size, num_kv_heads, head_dim_k]
    v: torch.Tensor  # [num_pages, page_size, num_kv_heads, head_dim_v]

    def keys(self, page_table: torch.Tensor, seq_lens: torch.Tensor) -> PagedKV:
        """As `attend` reads them."""
        return PagedKV(self.k, self.v, page_table, seq_lens)


def page_bytes(layers: Sequence[LayerShape], page_size: int) -> int:
    """Memory of one page over all layers."""
    return sum(layer.bytes_per_token for layer in layers) * page_size


def allocate_layers(
    layers: Sequence[LayerShape], num_pages: int, page_size: int, device: torch.device
) -> list[LayerCache]:
    """Zeros, so that rows never written hold numbers."""
    caches: list[LayerCache] = []
    for layer in layers:
        shape = (num_pages, page_size, layer.num_kv_heads)
        k, v = (
            _zeros((*shape, dim), layer.dtype, device)
            for dim in (layer.head_dim_k, layer.head_dim_v)
        )
        caches.append(LayerCache(k, v))
    return caches


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On a CPU, memory that the system fills in page by page when it is first written."""
    num_bytes = prod(shape) * dtype.itemsize
    if device.type != "cpu" or not num_bytes:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=dtype).view(shape)
