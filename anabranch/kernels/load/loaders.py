"""How a tile of keys or values is loaded: a pair of functions for each kind of store.

The first, `tile`, returns the tile and what its scales are found by; the second, `scales`, what the
rows of the tile are still to be multiplied by, or None. All of a kind have the same parameters.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton import constexpr_function

from anabranch.kernels.constants import AttendConstants, StoreConstants
from anabranch.kernels.load.addressing import (
    dim_ptrs,
    key_offsets,
    load_rows,
    load_scales,
    scale_offsets,
    scaled_as_tile,
)
from anabranch.kernels.load.codec import decode_tile
from anabranch.kernels.load.key_pairs import (
    given_pair_scales,
    load_key_pairs,
    load_pair_scales,
    load_value_pairs,
)
from anabranch.kernels.load.packed_codes import load_words


class Columns(NamedTuple):
    """Some columns of the keys, or values, of one kv head."""

    store: Any  # StoreArguments
    ptrs: Any  # [1, width], to the columns of the row at 0
    box: Any  # of a tensor descriptor, or None
    kv_head: Any


class Loader(NamedTuple):
    """What loads tiles of a store."""

    tile: Any
    scales: Any


@constexpr_function
def loader_of(constants: AttendConstants, side: StoreConstants, boxed: bool) -> Loader:
    if boxed:
        return Loader(load_box, load_scales)
    if constants.source.pairs and side.has_values:
        return Loader(load_value_pairs, given_pair_scales)
    if constants.source.pairs:
        return Loader(load_key_pairs, load_pair_scales)
    return Loader(load_words if side.words else load_plain, load_scales)


@triton.jit
def head_of(item, C: tl.constexpr):
    """The kv head whose keys an item reads."""
    kv_head = item.kv_head
    LIST_HEADS: tl.constexpr = C.source.list_heads
    if LIST_HEADS is not None:
        kv_head = item.block.origin % LIST_HEADS[0] * LIST_HEADS[1] // LIST_HEADS[0]
    if C.source.one_tile:
        kv_head *= 0  # there is one, which paired blocks of query heads read
    return kv_head


@triton.jit
def column_ptrs(store, kv_head, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    """Pointers [1, WIDTH] to columns [FIRST, FIRST + WIDTH) of a head."""
    return dim_ptrs(store.ptr + kv_head.to(tl.int64) * store.head, store.dim, FIRST, WIDTH)


@triton.jit
def load_box(
    columns,
    at,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    DTYPE: tl.constexpr,
    SIDE: tl.constexpr,
    C: tl.constexpr,
):
    """A tile that the tensor memory accelerator copies: it lies wholly inside the sequence."""
    column = columns.kv_head * columns.store.head + FIRST
    return columns.box.load([at.box_row, column]), at.keys


@triton.jit
def load_plain(
    columns,
    at,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    DTYPE: tl.constexpr,
    SIDE: tl.constexpr,
    C: tl.constexpr,
):
    """A tile of numbers, or of codes as numbers of the queries' dtype."""
    store = columns.store
    page, key = store.page, store.key
    if SIDE.strides is not None:
        page, key = SIDE.strides[0], SIDE.strides[1]
    places = key_offsets(at.looked_up, at.pages, page, key, C)
    scale_places = scale_offsets(columns, at, SIDE, C)
    tile = load_rows(columns.ptrs, places, FIRST, WIDTH, SIDE.dim)
    FORMAT: tl.constexpr = SIDE.format
    if FORMAT.scaling != "none":
        SCALED: tl.constexpr = scaled_as_tile(SIDE, DTYPE)
        scales = tile  # unused without scales
        if FORMAT.scaling == "block":
            FIRST_BLOCK: tl.constexpr = FIRST // FORMAT.block
            BLOCKS: tl.constexpr = WIDTH // FORMAT.block
            scale_ptrs = dim_ptrs(store.scales.ptr, store.scales.block, FIRST_BLOCK, BLOCKS)
            scales = load_rows(
                scale_ptrs, scale_places, FIRST_BLOCK, BLOCKS, SIDE.dim // FORMAT.block
            )
        elif SCALED:
            scales = tl.load(store.scales.ptr + scale_places)[:, None]
        tile = decode_tile(tile, scales, DTYPE, SCALED)
    return tile, scale_places
