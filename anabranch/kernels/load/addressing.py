"""Where rows lie: tensors with named strides, and keys in pages or in one long page."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from anabranch.kernels.load.codec import decode_tile
from anabranch.keys import KeyLists, KeyStore, KeyView, ScaleStore


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


@triton.jit
def dim_ptrs(ptr, dim_stride, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    """Pointers [1, WIDTH] to dims [FIRST, FIRST + WIDTH) of the row at `ptr`."""
    return ptr + ((FIRST + tl.arange(0, WIDTH)) * dim_stride)[None, :]


@triton.jit
def load_rows(ptrs, offsets, FIRST: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr):
    """Rows at `offsets` from `dim_ptrs`; dims beyond DIM are zero."""
    ptrs = ptrs + offsets[:, None]
    if FIRST + WIDTH > DIM:
        rows = tl.load(ptrs, (FIRST + tl.arange(0, WIDTH) < DIM)[None, :], other=0.0)
    else:
        rows = tl.load(ptrs)
    return rows


@triton.jit
def load_tile(
    store, box, ptrs, place, scale_place, kv_head,
    FIRST: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, DTYPE: tl.constexpr,
    FORMAT: tl.constexpr, SCALED: tl.constexpr, BOXED: tl.constexpr,
):  # fmt: skip
    """Dims [FIRST, FIRST + WIDTH) of a tile of keys or values, as numbers of the queries' dtype.

    Every tile comes through here, so this is where a format is decoded. `place` is the tile's first
    row in the box, or the offset of each key from `ptrs`, and `scale_place` that of its first
    scale. A tile that is not SCALED still lacks the scales of its keys: the caller applies them.
    """
    if BOXED:
        tile = box.load([place, kv_head * store.head + FIRST])
    else:
        tile = load_rows(ptrs, place, FIRST, WIDTH, DIM)
    if FORMAT.scaling != "none":
        scales = tile  # unused without scales
        if FORMAT.scaling == "block":
            FIRST_BLOCK: tl.constexpr = FIRST // FORMAT.block
            BLOCKS: tl.constexpr = WIDTH // FORMAT.block
            scale_ptrs = dim_ptrs(store.scales.ptr, store.scales.block, FIRST_BLOCK, BLOCKS)
            scales = load_rows(scale_ptrs, scale_place, FIRST_BLOCK, BLOCKS, DIM // FORMAT.block)
        elif SCALED:
            scales = tl.load(store.scales.ptr + scale_place)[:, None]
        tile = decode_tile(tile, scales, DTYPE, SCALED)
    return tile


@triton.jit
def load_pages(keys, origin, table_ptr, table_stride, PAGE_SIZE: tl.constexpr):
    """The page of each key of the sequence at `origin`, its row of the table.

    Contiguous keys have no table: the sequence is one page, and `origin` counts page strides.
    """
    pages = origin
    if table_ptr is not None:
        pages = tl.load(
            table_ptr + origin.to(tl.int64) * table_stride + keys.to(tl.uint32) // PAGE_SIZE
        )
    return pages


@triton.jit
def find_keys(places, row, count, lists, table_ptr, table_stride, LISTS: tl.constexpr):
    """Where keys at these places of a list lie, in strides of a page of one key (int32).

    Places from `count` on lie where the first does, and those of an empty list at 0: they are
    masked. Nothing but the place of unlisted keys waits for the count.
    """
    row_ptr = table_ptr + row.to(tl.int64) * table_stride
    keys = tl.load(row_ptr + tl.minimum(places, lists.width - 1))
    first = tl.load(row_ptr)
    token = row // LISTS.per_token
    kv_head = row % LISTS.per_token * LISTS.num_kv_heads // LISTS.per_token
    seq = token // lists.tokens_per_seq
    if lists.seqs is not None:
        seq = tl.load(lists.seqs + token)
    keys = tl.where(places < count, keys, first)
    pages = seq
    if lists.pages is not None:
        pages_ptr = lists.pages + seq.to(tl.int64) * lists.pages_stride
        pages = tl.load(pages_ptr + keys // LISTS.page_size, count > 0, other=0)
        keys = keys % LISTS.page_size
    found = pages * lists.page_step + keys * lists.key_step + kv_head * lists.head_step
    return tl.where(count > 0, found, 0)


@triton.jit
def bounded(keys, stop, seq_len, C: tl.constexpr):
    """Keys to look up: none after the last, or of lists, none after the last tile to attend to.

    What is listed after that may not be in the cache.
    """
    last = seq_len - 1
    if C.source.lists is not None:
        last = tl.maximum(stop * C.tiles.block_n - 1, 0)
    return tl.minimum(keys, last)


@triton.jit
def pages_of(keys, origin, seq_len, view, table_stride, C: tl.constexpr):
    """The pages of keys, or where listed ones lie."""
    LISTS: tl.constexpr = C.source.lists
    if LISTS is not None:
        pages = find_keys(keys, origin, seq_len, view.lists, view.table, table_stride, LISTS)
    else:
        pages = load_pages(keys, origin, view.table, table_stride, C.source.page_size)
    return pages


@triton.jit
def key_offsets(keys, pages, page_stride, key_stride, table_ptr, C: tl.constexpr):
    """Element offsets (int64) of keys in their pages; wide pages span 2^31 elements or more."""
    rows = keys.to(tl.int64) * key_stride
    if table_ptr is not None:
        rows = (keys.to(tl.uint32) % C.source.page_size).to(
            tl.int64 if C.source.wide_pages else tl.int32
        )
        rows = rows * key_stride
    return pages.to(tl.int64) * page_stride + rows
