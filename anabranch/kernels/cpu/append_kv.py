"""Writing new tokens into a paged cache of any strides, in any format."""

from __future__ import annotations

import torch

from anabranch.kernels.cpu.encode import encode_rows, encodes_rows
from anabranch.keys import KeyStore
from anabranch.keys.formats import encode


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
