"""Contiguous keys as boxes that the tensor memory accelerator copies."""

from __future__ import annotations

from typing import NamedTuple

from triton.tools.tensor_descriptor import TensorDescriptor

from anabranch.kernels.config import AttendConstants
from anabranch.kernels.triton.addressing import Pages


class Boxes(NamedTuple):
    """Contiguous keys as the tensor memory accelerator takes them: 2D, a row for each key."""

    k: TensorDescriptor  # boxes [block_n, dk_main] of [rows, heads and dims]
    k_rest: TensorDescriptor  # boxes [block_n, dk_rest]; those of k again without a rest
    v: TensorDescriptor  # boxes [block_n, block_dv]


def boxes_of(
    k: Pages, v: Pages, rows: int, origins: int, constants: AttendConstants
) -> Boxes | None:
    """Descriptors of contiguous keys, or None where the accelerator cannot take them.

    `origins` sequences (or, packed, keys) begin `rows` rows apart.
    """
    c = constants
    exact = c.head_dim_k == c.dk_main + c.dk_rest and c.head_dim_v == c.block_dv
    if not exact or c.block_m < 64 or k.ptr.element_size() != 2 or not origins * rows:
        return None
    for pages in (k, v):
        aligned = pages.ptr.data_ptr() % 16 == 0 and pages.key % 8 == 0 and pages.head % 8 == 0
        if not aligned or pages.dim != 1 or pages.page != pages.key * rows or pages.key <= 0:
            return None
        if c.num_kv_heads * max(pages.head, c.head_dim_k, c.head_dim_v) >= 1 << 31:
            return None  # a column would not fit into 32 bits

    def box(pages: Pages, dim: int, width: int) -> TensorDescriptor:
        shape = [origins * rows, (c.num_kv_heads - 1) * pages.head + dim]
        return TensorDescriptor(pages.ptr, shape, [pages.key, 1], [c.block_n, width])

    return Boxes(
        box(k, c.head_dim_k, c.dk_main),
        box(k, c.head_dim_k, c.dk_rest or c.dk_main),
        box(v, c.head_dim_v, c.block_dv),
    )
