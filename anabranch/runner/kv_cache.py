"""The tensors of a paged cache: keys and values of every layer, or rows that are both."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from anabranch.keys import LatentKV, PagedKV


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps of a token."""

    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    dtype: torch.dtype
    is_latent: bool = False  # one row a token, whose first columns are its value

    @property
    def bytes_per_token(self) -> int:
        """Of keys and values together."""
        columns = self.head_dim_k + (0 if self.is_latent else self.head_dim_v)
        return self.num_kv_heads * columns * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Pages of one layer."""

    k: torch.Tensor  # [num_pages, page_size, num_kv_heads, head_dim_k]
    v: torch.Tensor  # [num_pages, page_size, num_kv_heads, head_dim_v]; of latent rows, a view of k

    def keys(self, page_table: torch.Tensor, seq_lens: torch.Tensor) -> PagedKV:
        """As `attend` reads them."""
        return PagedKV(self.k, self.v, page_table, seq_lens)

    def latent_keys(self, page_table: torch.Tensor, seq_lens: torch.Tensor) -> LatentKV:
        """The rows of a latent layer, as `attend` reads them."""
        return LatentKV(self.k[:, :, 0], page_table, seq_lens, head_dim_v=self.v.shape[3])


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
        k = _zeros((*shape, layer.head_dim_k), layer.dtype, device)
        if layer.is_latent:
            v = k[..., : layer.head_dim_v]
        else:
            v = _zeros((*shape, layer.head_dim_v), layer.dtype, device)
        caches.append(LayerCache(k, v))
    return caches


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On a CPU, memory that the system fills in page by page when it is first written."""
    num_bytes = prod(shape) * dtype.itemsize
    if device.type != "cpu" or not num_bytes:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=dtype).view(shape)
