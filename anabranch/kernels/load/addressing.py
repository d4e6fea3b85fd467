"""Where the rows of a tile and their scales lie: in pages, in one long page, or in lists."""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton import constexpr_function

from anabranch.kernels.constants import AttendConstants


class Place(NamedTuple):
    """Where the rows of a tile lie."""

    keys: Any  # of each row, counted in the sequence
    looked_up: Any  # keys that have a place: those of rows, none after the last; the even of pairs
    pages: Any  # of these, or of the whole tile
    last: Any  # the sequence's last key
    box_row: Any  # of the first key, in boxes


@constexpr_function
def in_one_page(constants: AttendConstants) -> bool:
    """Whether a tile lies in one page, which is then looked up once, and not for each key."""
    source = constants.source
    return not source.is_plain and source.page_size % constants.tiles.block_n == 0


@triton.jit
def pair_rows(KEYS: tl.constexpr):
    """The keys of the rows of a tile of pairs: 0, 2, ... 14, 1, 3, ... 15, and so on by 16.

    The matrix unit gives a thread rows g and g + 8 of 16.
    """
    rows = tl.arange(0, KEYS)
    return rows // 16 * 16 + rows % 8 * 2 + rows // 8 % 2


@triton.jit
def keys_of_tile(index, C: tl.constexpr):
    """The keys of a tile that have a place of their own: every key, or the even ones of pairs."""
    if C.source.pairs:
        return index * C.tiles.block_n + tl.arange(0, C.tiles.block_n // 2) * 2
    else:
        return index * C.tiles.block_n + tl.arange(0, C.tiles.block_n)


@triton.jit
def first_pages(index, block, given, C: tl.constexpr):
    """The pages of the first tile. A list is read before its length is known."""
    keys = index * C.tiles.block_n
    if not in_one_page(C):
        keys = keys_of_tile(index, C)
    if C.source.lists is None:
        keys = tl.minimum(keys, block.seq_len - 1)
    return pages_of(keys, block, given, C)


@triton.jit
def next_keys(index, stop, block, C: tl.constexpr):
    """The keys to look up of the tile after `index`: none after the last one.

    Of lists, none after the last tile to attend to: what is listed there may not be in the cache.
    """
    keys = (index + 1) * C.tiles.block_n
    if not in_one_page(C):
        keys = keys_of_tile(index, C) + C.tiles.block_n
    last = block.seq_len - 1
    if C.source.lists is not None:
        last = tl.maximum(stop * C.tiles.block_n - 1, 0)
    return tl.minimum(keys, last)


@triton.jit
def pages_of(keys, block, given, C: tl.constexpr):
    """The pages of keys, or where listed ones lie."""
    LISTS: tl.constexpr = C.source.lists
    view, stride = given.view, given.table_stride
    if LISTS is not None:
        pages = find_keys(keys, block.origin, block.seq_len, view.lists, view.table, stride, LISTS)
    else:
        pages = load_pages(keys, block.origin, view.table, stride, C.source.page_size)
    return pages


@triton.jit
def place_tile(index, pages, box_row, block, C: tl.constexpr, BOXED: tl.constexpr):
    """Where a tile lies. Keys after the last one read it again: cheaper than a masked copy."""
    last = block.seq_len - 1
    if C.source.pairs:
        keys = index * C.tiles.block_n + pair_rows(C.tiles.block_n)
        looked_up = keys_of_tile(index, C)
    else:
        keys = keys_of_tile(index, C)
        looked_up = keys
        if not BOXED:
            looked_up = tl.minimum(keys, last)
    if BOXED:
        if C.source.is_paged:
            box_row = pages * C.source.page_size + index * C.tiles.block_n % C.source.page_size
        else:
            box_row = box_row + index * C.tiles.block_n
    return Place(keys, looked_up, pages, last, box_row)


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
def key_offsets(keys, pages, page_stride, key_stride, C: tl.constexpr):
    """Element offsets (int64) of keys in their pages; wide pages span 2^31 elements or more."""
    rows = keys.to(tl.int64) * key_stride
    if C.source.is_paged:
        rows = (keys.to(tl.uint32) % C.source.page_size).to(
            tl.int64 if C.source.wide_pages else tl.int32
        )
        rows = rows * key_stride
    return pages.to(tl.int64) * page_stride + rows


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


@triton.constexpr_function
def scaled_as_tile(side, dtype):
    """Whether scales are multiplied into a tile, and not into scores or weights.

    Those of blocks are; and those of values for float16, in which a small scale of a weight would
    underflow. Words are converted with the scales of their blocks.
    """
    if side.words:
        return False
    if side.format.scaling == "block":
        return True
    return side.format.scaling != "none" and side.has_values and dtype == tl.float16


@triton.constexpr_function
def scaled_by_key(side, dtype):
    """Whether scores or weights of a tile are multiplied by the scale of each key.

    The one scale of a tensor of words is multiplied in once, not for each key.
    """
    if side.words:
        return side.format.scaling == "key"
    return side.format.scaling != "none" and not scaled_as_tile(side, dtype)


@triton.jit
def load_scales(columns, at, places, DTYPE: tl.constexpr, SIDE: tl.constexpr, C: tl.constexpr):
    """The scale of each key that its tile lacks, or None; `places` as `scale_offsets` has them."""
    scales = None
    if scaled_by_key(SIDE, DTYPE):
        scales = tl.load(columns.store.scales.ptr + places)
    return scales


@triton.jit
def scale_offsets(columns, at, SIDE: tl.constexpr, C: tl.constexpr):
    """Element offsets (int64) of the first scale of one head of each key."""
    offsets = at.looked_up  # unused without scales
    if SIDE.format.scaling != "none":
        STRIDES: tl.constexpr = SIDE.scale_strides
        offsets = key_offsets(at.looked_up, at.pages, STRIDES[0], STRIDES[1], C)
        offsets += head_offset(columns, SIDE)
    return offsets


@triton.jit
def head_offset(columns, SIDE: tl.constexpr):
    """The element offset (int64) of the scales of a head."""
    head = columns.store.scales.head
    if SIDE.scale_strides[2] is not None:
        head = SIDE.scale_strides[2]
    return columns.kv_head.to(tl.int64) * head
