"""Store formats: what each one keeps in memory, and how numbers are encoded and decoded."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from anabranch.keys.view import PLAIN, KeyStore, ScaleStore, StoreFormat, store_of
from anabranch.shapes import FLOATS, check_device, check_dtype

BLOCK = 32  # elements of a block of Q8_0
FP8_TENSOR = StoreFormat("fp8_tensor", "tensor")  # e4m3 codes, one float32 scale
FP8 = StoreFormat("fp8", "key")  # e4m3 codes, a float32 scale for a head of a key
INT8 = StoreFormat("int8", "key")
Q8_0 = StoreFormat("q8_0", "block", BLOCK)  # ggml's: int8 codes, a float16 scale for 32 of them
FORMATS = {x.name: x for x in (PLAIN, FP8_TENSOR, FP8, INT8, Q8_0)}
E4M3 = torch.float8_e4m3fn
LARGEST = {E4M3: 448.0, torch.int8: 127.0}  # number that a code stands for, before its scale


class Encoded(NamedTuple):
    """Codes, their scales, and how many elements had no code of their own."""

    codes: torch.Tensor  # [..., dim]
    scales: torch.Tensor  # [..., blocks]
    saturated: torch.Tensor  # int64, one number


def empty_store(
    format_name: str,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    allocate: Callable[..., torch.Tensor] = torch.empty,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Memory for keys [num_pages, page_size, num_kv_heads, head_dim] in a format, and its scales.

    `dtype` is that of the queries. The scale of "fp8_tensor" is 1. Scales of keys and blocks lie
    heads first in memory: those of one head's neighbouring keys are loaded together. `allocate` is
    called with a shape, `dtype` and `device`.
    """
    if format_name not in FORMATS:
        raise ValueError(f"a format must be one of {', '.join(FORMATS)}, got {format_name!r}")
    if format_name == "plain":
        return allocate(shape, dtype=dtype, device=device), None
    codes = E4M3 if FORMATS[format_name].is_fp8 else torch.int8
    cache = allocate(shape, dtype=codes, device=device)
    if format_name == "fp8_tensor":
        return cache, torch.ones(1, dtype=torch.float32, device=device)
    if format_name == "q8_0":
        check_blocks("head_dim", shape[-1])
        blocks = (shape[2], *shape[:2], shape[-1] // BLOCK)
        return cache, allocate(blocks, dtype=torch.float16, device=device).permute(1, 2, 0, 3)
    scales = allocate((shape[2], *shape[:2]), dtype=torch.float32, device=device)
    return cache, scales.permute(1, 2, 0)


def bytes_per_head(format_name: str, dim: int, dtype: torch.dtype) -> int:
    """Memory of one head of a key, with its own scales; `dtype` is that of the queries."""
    format = FORMATS[format_name]
    if format == PLAIN:
        return dim * dtype.itemsize
    if format.scaling == "block":
        check_blocks("head_dim", dim)
        return dim + dim // format.block * torch.float16.itemsize
    return dim + (torch.float32.itemsize if format.scaling == "key" else 0)


def encoded_store(name: str, cache: torch.Tensor, scales: torch.Tensor | None) -> KeyStore:
    """The store of a cache [pages, keys, heads, dim], whose format its dtypes and shapes say.

    `scales` is None for plain keys, float32 of one element or [pages, keys, heads] for fp8,
    float32 [pages, keys, heads] for int8, float16 [pages, keys, heads, dim / 32] for Q8_0.
    """
    check_dtype(name, cache, (*FLOATS, torch.int8, E4M3))
    if cache.dtype in FLOATS:
        if scales is not None:
            raise ValueError(f"{name} of {cache.dtype} has no scales, got {tuple(scales.shape)}")
        return store_of(cache)
    if scales is None:
        raise ValueError(f"{name} of {cache.dtype} needs {name}_scales")
    check_device(f"{name}_scales", scales, cache.device)
    blocks, format = _expand_scales(name, cache, scales)
    page, key, head, dim = cache.stride()
    return KeyStore(cache, page, key, head, dim, format, ScaleStore(blocks, *blocks.stride()))


def _expand_scales(
    name: str, cache: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, StoreFormat]:
    """Scales as [pages, keys, heads, blocks], and the format that they make of the cache."""
    rows = cache.shape[:-1]
    if cache.dtype == torch.int8 and scales.dtype == torch.float16:
        check_blocks(name, cache.shape[-1])
        _check_shape(name, scales, (*rows, cache.shape[-1] // BLOCK))
        return scales, Q8_0
    allowed = (torch.float32, torch.float16) if cache.dtype == torch.int8 else (torch.float32,)
    check_dtype(f"{name}_scales", scales, allowed)
    if cache.dtype == E4M3 and scales.numel() == 1 and scales.dim() <= 1:
        return scales.view(1, 1, 1, 1).expand(*rows, 1), FP8_TENSOR
    _check_shape(name, scales, rows)
    return scales[..., None], FP8 if cache.dtype == E4M3 else INT8


def _check_shape(name: str, scales: torch.Tensor, shape: tuple[int, ...]) -> None:
    if scales.shape != shape:
        given = tuple(scales.shape)
        raise ValueError(f"{name}_scales must be {tuple(shape)} for this {name}, got {given}")


def check_blocks(name: str, dim: int) -> None:
    """Refuse a width that blocks do not divide."""
    if dim % BLOCK:
        raise ValueError(f"Q8_0 has blocks of {BLOCK}, got {name} with {dim} columns")


def encode(x: torch.Tensor, format: StoreFormat, scales: torch.Tensor | None = None) -> Encoded:
    """Numbers [..., dim] as codes; `scales` holds the one of a format with a scale a tensor.

    A scale is that of the largest finite element. An infinity gets the largest code, NaN the code
    of 0, and both count as saturated, as does what exceeds the range of a scale a tensor.
    """
    dtype = E4M3 if format.is_fp8 else torch.int8
    largest = LARGEST[dtype]
    width = format.block or x.shape[-1]
    blocks = x.float().reshape(*x.shape[:-1], x.shape[-1] // width, width)
    finite = blocks.isfinite()
    if format.scaling == "tensor":
        assert scales is not None
        scale = scales.flatten()[:1].expand(*blocks.shape[:-1])
    else:
        scale = blocks.where(finite, 0.0).abs().amax(-1) / largest
    # a subnormal scale has no inverse
    inverse = torch.where(scale < torch.finfo(torch.float32).tiny, 0.0, 1.0 / scale)
    scaled = (blocks * inverse[..., None]).where(finite, blocks).nan_to_num(0.0)
    beyond = ~finite
    if format.scaling == "tensor":
        beyond = beyond | (scaled.abs() > largest)
    if dtype == torch.int8:
        scaled = _round_half_away(scaled)
    codes = scaled.clamp(-largest, largest).to(dtype).flatten(-2)
    if format == Q8_0:
        scale = scale.clamp_max(torch.finfo(torch.float16).max).half()
    return Encoded(codes, scale, beyond.sum())


def _round_half_away(x: torch.Tensor) -> torch.Tensor:
    """C's roundf."""
    size = x.abs()
    floor = size.floor()
    return x.sign() * (floor + (2 * (size - floor)).floor())


def decode(codes: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """The numbers that codes [..., dim] with scales [..., blocks] stand for."""
    if scales is None:
        return codes.to(dtype)
    num_blocks = scales.shape[-1]
    blocks = codes.float().reshape(*codes.shape[:-1], num_blocks, codes.shape[-1] // num_blocks)
    return (blocks * scales.float()[..., None]).flatten(-2).to(dtype)


class EncodedRows(NamedTuple):
    """A store [outer, inner, heads, dim] whose rows are read decoded, for the CPU."""

    codes: torch.Tensor
    scales: torch.Tensor | None  # [outer, inner, heads, blocks]

    def read(
        self,
        outer: torch.Tensor,  # [*]
        inner: torch.Tensor,  # [*]
        dtype: torch.dtype,
        heads: torch.Tensor | None = None,  # [*], of one head instead of all
    ) -> torch.Tensor:
        """A copy of these rows [*, heads, dim] as numbers."""
        places = (outer, inner) if heads is None else (outer, inner, heads)
        if self.scales is None:
            rows = self.codes[places].to(dtype)
        else:  # torch indexes bytes, not float8
            codes = self.codes.view(torch.int8)[places].view(self.codes.dtype)
            rows = decode(codes, self.scales[places], dtype)
        return rows if heads is None else rows.unsqueeze(-2)


def rows_of(store: KeyStore) -> EncodedRows:
    """A store's rows, to be read decoded."""
    return EncodedRows(store.ptr, None if store.scales is None else store.scales.ptr)
