"""The tensors of a paged cache: keys and values of every layer, or rows that are both."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import gcd, prod
from typing import NamedTuple

import torch

from anabranch.compositions.prompt_workspace import ExpandedKeys
from anabranch.keys import LatentKV, PagedKV
from anabranch.keys.formats import FORMATS, bytes_per_head, empty_store

AUTO = "auto"  # the dtype of the model
FORMAT_NAMES = {AUTO: "plain"} | {name: name for name in FORMATS if name != "plain"}


class CacheFormats(NamedTuple):
    """Names of store formats."""

    k: str = "plain"
    v: str = "plain"

    @property
    def is_plain(self) -> bool:
        """Whether keys and values are kept as the model computes them."""
        return self.k == self.v == "plain"


PLAIN_CACHE = CacheFormats()


def parse_cache_formats(given: str) -> CacheFormats:
    """From "int8", or from "q8_0/fp8", where keys and values differ."""
    names = given.split("/")
    if len(names) > 2 or not all(name in FORMAT_NAMES for name in names):
        raise ValueError(
            f"kv_cache_dtype must be one of {', '.join(FORMAT_NAMES)}, or two of them as in "
            f"'q8_0/fp8' for keys and values, got {given!r}"
        )
    return CacheFormats(FORMAT_NAMES[names[0]], FORMAT_NAMES[names[-1]])


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

    def expands_prompts(self, device: torch.device) -> bool:
        """Whether attention of prompts may expand keys, which takes memory."""
        dims = self.head_dim_k, self.head_dim_v
        expanded = ExpandedKeys(self.num_kv_heads, 1, *dims, self.dtype, device)
        return self.is_latent or (not self.formats.is_plain and expanded.runs_on_hopper)

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


def token_rows(cache: LayerCache) -> Iterator[torch.Tensor]:
    """Bytes [num_slots, row_bytes] of each of a layer's tensors that has a row for every slot.

    Keys, values and scales of a token are such rows; a scale of a whole tensor is not. Scales that
    lie heads first are rows of each head.
    """
    seen = set[int]()
    for value in cache.tensors():
        if value is None or value.shape[:2] != cache.k.shape[:2]:
            continue
        memory = value.untyped_storage().data_ptr()
        if memory not in seen:  # values may be columns of the keys
            seen.add(memory)
            num_slots = value.shape[0] * value.shape[1]
            has_rows = value.is_contiguous() and value.shape[2] > 1
            for part in [value] if has_rows else value.unbind(2):
                yield part.view(num_slots, -1).view(torch.uint8)


class CacheRows:
    """Rows of all layers, and where they begin in device memory."""

    def __init__(self, caches: Sequence[LayerCache]) -> None:
        self._rows = [rows for cache in caches for rows in token_rows(cache)]
        places = [(rows.data_ptr(), rows.shape[1]) for rows in self._rows]
        self.word_bytes = gcd(8, *chain.from_iterable(places))
        table = [(address, row_bytes // self.word_bytes) for address, row_bytes in places]
        self.table = torch.tensor(table, dtype=torch.int64, device=self._rows[0].device)
        self.longest = max(words for _, words in table)

    def move(self, slots: torch.Tensor, path: torch.Tensor, num_accepted: torch.Tensor) -> None:
        """Move accepted nodes of trees next to the context, all on the device.

        The node `path[seq, depth]` lies at `slots[seq, path[seq, depth]]` and is copied to
        `slots[seq, depth]`, for every depth from 1 to `num_accepted[seq]`.
        """
        if slots.is_cuda:
            from anabranch.kernels.triton.move_rows import move_rows

            stores = self.table, self.longest, self.word_bytes
            move_rows(*stores, slots, path, num_accepted)
        else:
            from anabranch.kernels.cpu.move_rows import move_rows

            move_rows(self._rows, slots, path, num_accepted)
