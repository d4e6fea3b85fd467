"""Contiguous keys as boxes that the tensor memory accelerator copies."""

from __future__ import annotations

from typing import NamedTuple

from triton.tools.tensor_descriptor import TensorDescriptor

from anabranch.kernels.triton.constants import AttendConstants
from anabranch.keys import PLAIN, KeyStore, KeyView


class Boxes(NamedTuple):
    """Contiguous keys as the tensor memory accelerator takes them: 2D, a row for each key."""

    k: TensorDescriptor  # boxes [block_n, dk_main] of [rows, heads and dims]
    k_rest: TensorDescriptor  # boxes [block_n, dk_rest]; those of k again without a rest
    v: TensorDescriptor  # boxes [block_n, block_dv]


def boxes_of(view: KeyView, constants: AttendConstants) -> Boxes | None:
    """Descriptors of contiguous keys, or None where the accelerator cannot take them."""
    c, tiles, rows = constants, constants.tiles, view.page_size
    origins = view.k.ptr.shape[0]
    if tiles.block_m < 64 or not origins * rows:
        return None
    whole = tiles.boxed_pages and rows % tiles.block_n == 0 and origins * rows < 1 << 31
    if view.page_table is not None and not whole:
        return None
    exact = c.head_dim_k == tiles.dk_main + tiles.dk_rest and c.head_dim_v == tiles.block_dv
    if not exact or view.k.ptr.element_size() != 2:
        return None
    for store in (view.k, view.v):
        aligned = store.ptr.data_ptr() % 16 == 0 and store.key % 8 == 0 and store.head % 8 == 0
        if not aligned or store.dim != 1 or store.page != store.key * rows or store.key <= 0:
            return None
        if store.format != PLAIN:
            return None
        if c.num_kv_heads * max(store.head, c.head_dim_k, c.head_dim_v) >= 1 << 31:
            return None  # a column would not fit into 32 bits

    def box(store: KeyStore, dim: int, width: int) -> TensorDescriptor:
        num_heads = 1 if view.values_in_keys else c.num_kv_heads
        shape = [origins * rows, (num_heads - 1) * store.head + dim]
        return TensorDescriptor(store.ptr, shape, [store.key, 1], [tiles.block_n, width])

    return Boxes(
        box(view.k, c.head_dim_k, tiles.dk_main),
        box(view.k, c.head_dim_k, tiles.dk_rest or tiles.dk_main),
        box(view.v, c.head_dim_v, tiles.block_dv),
    )
