"""Writing new tokens into a paged cache of any strides, in any format."""

from __future__ import annotations

import ctypes

import torch

from anabranch.kernels.cpu.native import native
from anabranch.keys import KeyStore
from anabranch.keys.formats import encode

MAX_WIDTH = 1024  # numbers that share a scale


def append_kv(
    stores: tuple[KeyStore, ...],
    new: tuple[torch.Tensor, ...],  # [num_tokens, num_kv_heads, dim] for each store
    slot_mapping: torch.Tensor,  # integer [num_tokens], page * page_size + row; negative = skip
    saturated: torch.Tensor | None,  # int32 [1]
) -> None:
    """Write each token to its slot, in place, and add how many elements saturated."""
    slots = slot_mapping.long()
    if all(map(encodes_rows, stores, new)):
        for store, rows in zip(stores, new, strict=True):
            encode_rows(store, rows, slots, saturated)
        return
    kept = slots >= 0
    if not kept.all():
        slots, new = slots[kept], tuple(rows[kept] for rows in new)
    page_size = stores[0].ptr.shape[1]
    places = slots // page_size, slots % page_size
    for store, rows in zip(stores, new, strict=True):
        if store.scales is None:
            store.ptr[places] = rows
            continue
        codes, scales, beyond = encode(rows, store.format, store.scales.ptr)
        # torch writes bytes, not float8, to an index
        store.ptr.view(torch.int8)[places] = codes.view(torch.int8)
        if store.format.scaling != "tensor":
            store.scales.ptr[places] = scales
        if saturated is not None:
            saturated += beyond


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
    """Write what `encode` gives, by our own kernel, and add how many elements saturated."""
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
