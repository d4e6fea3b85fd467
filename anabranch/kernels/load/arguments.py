"""What kernels are given: tensors with named strides, stores, views, lists of keys, and boxes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from anabranch.device import has_overlap
from anabranch.kernels.constants import AttendConstants
from anabranch.keys import PLAIN, KeyLists, KeyStore, KeyView, ScaleStore


class Rows(NamedTuple):
    """A tensor [tokens, heads, dims] and its strides, flat so that kernels can pass it on."""

    ptr: torch.Tensor
    token: int
    head: int
    dim: int


class StoreArguments(NamedTuple):
    """A store as a kernel takes it; its format is a constant."""

    ptr: torch.Tensor
    page: int
    key: int
    head: int
    dim: int
    scales: ScaleStore | None


class ListArguments(NamedTuple):
    """Where listed keys lie, as KeyLists has it; sizes of pages and heads are constants."""

    seqs: torch.Tensor | None  # [num_tokens]
    pages: torch.Tensor | None  # [num_seqs, max_pages]
    pages_stride: int
    tokens_per_seq: int
    width: int
    page_step: int
    key_step: int
    head_step: int


class ViewArguments(NamedTuple):
    """The view of a source as a kernel takes it."""

    k: StoreArguments
    v: StoreArguments
    table: torch.Tensor | None
    log_weights: torch.Tensor | None  # in the shape of the table
    lists: ListArguments | None = None  # the table then holds lists of keys, not of pages


def store_arguments(store: KeyStore, native_fp8: bool = False) -> StoreArguments:
    """A store without its format; float8 as bytes where the GPU has no such type."""
    ptr = store.ptr
    if ptr.dtype == torch.float8_e4m3fn and not native_fp8:
        ptr = ptr.view(torch.uint8)
    return StoreArguments(ptr, store.page, store.key, store.head, store.dim, store.scales)


def view_arguments(view: KeyView, native_fp8: bool) -> ViewArguments:
    """A view without what kernels know as constants."""
    stores = (store_arguments(store, native_fp8) for store in (view.k, view.v))
    return ViewArguments(*stores, view.page_table, view.log_weights)


def list_arguments(lists: KeyLists) -> ListArguments:
    """Lists without what kernels know as constants, and without the lists themselves."""
    pages = lists.page_table
    return ListArguments(
        lists.seqs,
        pages,
        0 if pages is None else pages.stride(0),
        lists.tokens_per_seq,
        lists.indices.shape[1],
        lists.page_step,
        lists.key_step,
        lists.head_step,
    )


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
