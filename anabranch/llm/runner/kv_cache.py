"""The tensors of a paged cache: keys and values of every layer, or rows that are both."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from anabranch.keys import LatentKV, PagedKV
from anabranch.keys.formats import bytes_per_head, empty_store
from anabranch.llm.runner.cache_formats import PLAIN_CACHE, CacheFormats


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps of a token."""

    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    dtype: torch.dtype  # of the model
    formats: CacheFormats = PLAIN_CACHE
    is_latent: bool = False  # one row a token, whose first columns are its value

    def __post_init__(self) -> None:
        if self.is_latent and self.formats.k != self.formats.v:
            raise ValueError(
                "a latent row is key and value and has one format, got "
                f"{self.formats.k} for keys and {self.formats.v} for values"
            )

    @property
    def bytes_per_token(self) -> int:
        """Of keys and values together, with their scales."""
        k = bytes_per_head(self.formats.k, self.head_dim_k, self.dtype)
        v = bytes_per_head(self.formats.v, self.head_dim_v, self.dtype)
        return self.num_kv_heads * (k + (0 if self.is_latent else v))


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Pages of one layer."""

    k: torch.Tensor  # [num_pages, page_size, num_kv_heads, head_dim_k]
    v: torch.Tensor  # [num_pages, page_size, num_kv_heads, head_dim_v]; of latent rows, a view of k
    k_scales: torch.Tensor | None = None
    v_scales: torch.Tensor | None = None
    saturated: torch.Tensor | None = None  # int32 [1]: elements that had no code of their own
    query_dtype: torch.dtype | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it holds keys and values as the model computes them."""
        return self.k_scales is None and self.v_scales is None

    def tensors(self) -> list[torch.Tensor | None]:
        """Its memory, in the order of the fields."""
        return [self.k, self.v, self.k_scales, self.v_scales, self.saturated]

    def keys(self, page_table: torch.Tensor, seq_lens: torch.Tensor) -> PagedKV:
        if self.is_plain:
            return PagedKV(self.k, self.v, page_table, seq_lens)
        scales = {"k_scales": self.k_scales, "v_scales": self.v_scales}
        return PagedKV(self.k, self.v, page_table, seq_lens, **scales, query_dtype=self.query_dtype)

    def latent_keys(self, page_table: torch.Tensor, seq_lens: torch.Tensor) -> LatentKV:
        """The rows of a latent layer, as `attend` reads them."""
        scales = self.k_scales
        if scales is not None and scales.dim() > 1:
            scales = scales[:, :, 0]
        head_dim_v, dtype = self.v.shape[3], self.query_dtype
        return LatentKV(self.k[:, :, 0], page_table, seq_lens, head_dim_v, scales, dtype)


def page_bytes(layers: Sequence[LayerShape], page_size: int) -> int:
    """Memory of one page over all layers."""
    return sum(layer.bytes_per_token for layer in layers) * page_size


def allocate_layers(
    layers: Sequence[LayerShape],
    num_pages: int,
    page_size: int,
    device: torch.device,
    saturated: torch.Tensor | None = None,
) -> list[LayerCache]:
    """Zeros, so that rows never written hold numbers."""
    caches: list[LayerCache] = []
    for layer in layers:
        shape = (num_pages, page_size, layer.num_kv_heads)
        k, k_scales = empty_store(
            layer.formats.k, (*shape, layer.head_dim_k), layer.dtype, device, allocate=_zeros
        )
        v, v_scales = k[..., : layer.head_dim_v], None
        if not layer.is_latent:
            v, v_scales = empty_store(
                layer.formats.v, (*shape, layer.head_dim_v), layer.dtype, device, allocate=_zeros
            )
        caches.append(LayerCache(k, v, k_scales, v_scales, saturated, layer.dtype))
    return caches


def _zeros(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On a CPU, memory that the system fills in page by page when it is first written."""
    num_bytes = prod(shape) * dtype.itemsize
    if device.type != "cpu" or not num_bytes:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=dtype).view(shape)
