"""Contiguous keys and pages as boxes that the tensor memory accelerator copies."""

from __future__ import annotations

from typing import NamedTuple

from triton.tools.tensor_descriptor import TensorDescriptor

from anabranch.device import has_overlap
from anabranch.kernels.constants import AttendConstants
from anabranch.keys import PLAIN, KeyStore, KeyView


class Boxes(NamedTuple):
    """Keys as the tensor memory accelerator takes them: 2D, a row for each key."""

    k: TensorDescriptor  # boxes [block_n, dk_main] of [rows, heads and dims]
    k_rest: TensorDescriptor  # boxes [block_n, dk_rest]; those of k again without a rest
    v: TensorDescriptor  # boxes [block_n, block_dv]


def boxes_of(view: KeyView, constants: AttendConstants) -> Boxes | None:
    """Descriptors of contiguous keys or of pages, or None where the accelerator cannot take them.

    A box of a page must hold whole tiles, and the tiles must be those of paired blocks.
    """
    c, tiles, rows = constants, constants.tiles, view.page_size
    origins, device = view.k.ptr.shape[0], view.k.ptr.device
    if tiles.block_m < 64 or not origins * rows:
        return None
    if device.type == "cuda" and not has_overlap(device):
        return None  # before Hopper: Triton would load boxes two bytes at a time, and spill
    whole = tiles.paired and rows % tiles.block_n == 0 and origins * rows < 1 << 31
    if view.page_table is not None and not whole:
        return None
    exact = c.head_dim_k == tiles.dk_main + tiles.dk_rest and c.head_dim_v == tiles.block_dv
    if not exact or not _is_regular(view):
        return None
    num_heads = view.k.ptr.shape[-2]
    for store in (view.k, view.v):
        if store.ptr.data_ptr() % 16:
            return None
        if num_heads * max(store.head, c.head_dim_k, c.head_dim_v) >= 1 << 31:
            return None  # a column would not fit into 32 bits

    def box(store: KeyStore, dim: int, width: int) -> TensorDescriptor:
        shape = [origins * rows, (num_heads - 1) * store.head + dim]
        return TensorDescriptor(store.ptr, shape, [store.key, 1], [tiles.block_n, width])

    return Boxes(
        box(view.k, c.head_dim_k, tiles.dk_main),
        box(view.k, c.head_dim_k, tiles.dk_rest or tiles.dk_main),
        box(view.v, c.head_dim_v, tiles.block_dv),
    )


def box_keys(view: KeyView) -> int:
    """Keys of a page that are one box, whatever the tiles; 0 where none are."""
    return view.page_size if view.page_table is not None and _is_regular(view) else 0


def _is_regular(view: KeyView) -> bool:
    """Whether keys are 16-bit numbers at equal distances, in multiples of 16 bytes."""
    for store in (view.k, view.v):
        aligned = store.key > 0 and store.key % 8 == 0 and store.head % 8 == 0
        if not aligned or store.dim != 1 or store.page != store.key * view.page_size:
            return False
        if store.format != PLAIN or store.ptr.element_size() != 2:
            return False
    return True
