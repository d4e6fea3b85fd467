"""New rows into a quantised cache on the CPU by a kernel of ours."""

from __future__ import annotations

import ctypes

import torch

from anabranch.kernels.cpu.native import native
from anabranch.keys import KeyStore

MAX_WIDTH = 1024  # numbers that share a scale


def encodes_rows(store: KeyStore, rows: torch.Tensor) -> bool:
    """Whether `encode_rows` can write these rows [num_tokens, num_heads, dim] to a store."""
    return (
        store.scales is not None
        and rows.dtype == torch.float32
        and (rows.stride(-1) == 1 and store.dim == 1)
        and (store.format.block or rows.shape[-1]) <= MAX_WIDTH
        and native() is not None
    )


def encode_rows(
    store: KeyStore,
    rows: torch.Tensor,  # [num_tokens, num_heads, dim]
    slots: torch.Tensor,  # int64 [num_tokens], negative = skip
    saturated: torch.Tensor | None,  # int32 [1]
) -> None:
    """What encode() gives, written in place; numbers that saturated are counted."""
    scales, (num_pages, page_size) = store.scales, store.ptr.shape[:2]
    assert scales is not None
    num_tokens, num_heads, dim = rows.shape
    slots = slots.contiguous()
    sizes = (
        *rows.stride()[:2],
        *(store.page, store.key, store.head),
        *(scales.page, scales.key, scales.head, scales.block),
        2 if store.format.is_fp8 else 1,
        scales.ptr.dtype == torch.float16,
        store.format.scaling == "tensor",
        store.format.block or dim,
        *(num_tokens, num_heads, dim, num_pages, page_size),
    )
    found = native().encode_rows(
        *(each.data_ptr() for each in (rows, slots, store.ptr, scales.ptr)),
        (ctypes.c_int64 * len(sizes))(*sizes),
        torch.get_num_threads(),
    )
    if found < 0:
        raise IndexError(
            f"token {-found - 1} has slot {int(slots[-found - 1])}, "
            f"but there are {num_pages * page_size} slots"
        )
    if saturated is not None and found:
        saturated += found
