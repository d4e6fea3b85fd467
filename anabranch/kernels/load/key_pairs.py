"""Tiles of codes of 8 bits loaded by pairs of neighbouring keys, 128 dims wide, for few rows.

Both tiles are made in registers as the matrix unit takes them: a thread has two keys of a tile of
keys, and pairs of keys of the transposed tile of values. A page and a place are looked up for each
pair. Rows of a tile of keys are in the order of `pair_rows`, sums over values in that of
`permute_sums`. The orders are those of products with 8 columns, which halve what 16 compute.
"""

from __future__ import annotations

import triton
import triton.language as tl

from anabranch.kernels.load.addressing import key_offsets
from anabranch.kernels.load.packed_codes import (
    halves_of_e4m3,
    halves_of_int8,
    in_words,
    permute_dims,
    transposed_halves,
)
from anabranch.kernels.load.scales import head_offset
from anabranch.keys import KeyView

WIDTH: tl.constexpr = tl.constexpr(128)


def in_pairs(view: KeyView) -> bool:
    """Whether keys and values are codes that can be loaded by pairs."""
    stores = (view.k, view.v)
    return (
        not view.values_in_keys
        and view.page_size % 2 == 0
        and all(in_words(x) and x.ptr.shape[-1] == WIDTH.value for x in stores)
        and all(x.format.scaling != "block" for x in stores)
    )


@triton.jit
def pair_rows(KEYS: tl.constexpr):
    """The keys of the rows of a tile: 0, 2, ... 14, 1, 3, ... 15, and so on by 16.

    The matrix unit gives a thread rows g and g + 8 of 16.
    """
    rows = tl.arange(0, KEYS)
    return rows // 16 * 16 + rows % 8 * 2 + rows // 8 % 2


@triton.jit
def join_rows(even, odd):
    """A vector or tile [KEYS, ...] in the order of `pair_rows` from its even and odd keys."""
    PAIRS: tl.constexpr = even.shape[0]
    rows = tl.join(even, odd)
    if len(even.shape) == 1:
        rows = tl.permute(tl.reshape(rows, [PAIRS // 8, 8, 2]), [0, 2, 1])
        return tl.reshape(rows, [2 * PAIRS])
    else:
        rows = tl.reshape(rows, [PAIRS // 8, 8, even.shape[1], 2])
        return tl.reshape(tl.permute(rows, [0, 3, 1, 2]), [2 * PAIRS, even.shape[1]])


@triton.jit
def order_weights(weights):
    """Weights [KEYS, ROWS] of `pair_rows`, in the order of `load_value_pairs`."""
    KEYS: tl.constexpr = weights.shape[0]
    ROWS: tl.constexpr = weights.shape[1]
    weights = tl.reshape(weights, [KEYS // 16, 2, 2, 4, ROWS])
    return tl.reshape(tl.permute(weights, [0, 3, 2, 1, 4]), [KEYS, ROWS])


@triton.jit
def permute_sums(x):
    """Sums [ROWS, 128] in the order of the dims of `load_value_pairs`.

    The matrix unit gives a thread rows g, g + 8, g + 64 and g + 72 of 128: the dims of a word.
    """
    x = tl.reshape(x, [x.shape[0], 4, 8, 2, 2])
    return tl.reshape(tl.permute(x, [0, 3, 1, 4, 2]), [x.shape[0], WIDTH])


@triton.jit
def restore_sums(x):
    """Sums [ROWS, 128] as they were before `permute_sums`."""
    x = tl.reshape(x, [x.shape[0], 2, 4, 2, 8])
    return tl.reshape(tl.permute(x, [0, 2, 4, 1, 3]), [x.shape[0], WIDTH])


@triton.jit
def load_pair_words(
    store, keys, last, pages, page_stride, key_stride, kv_head, table_ptr,
    BOUNDED: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Words [pairs, 32] of even keys, and those of odd ones: BOUNDED, none after the last key.

    Otherwise one key after the last may be read: it lies in the same page, written or not.
    """
    ptr = tl.cast(store.ptr, tl.pointer_type(tl.int32), bitcast=True)
    ptr += kv_head.to(tl.int64) * (store.head // 4)
    evens = tl.minimum(keys, last // 2 * 2)
    places = key_offsets(evens, pages, page_stride // 4, key_stride // 4, table_ptr, C)
    # A fourth axis: of three, Triton keeps the first one outermost in shared memory. So halves of
    # rows are next to each other there, and threads read them from different banks.
    halves = tl.arange(0, 2)[None, :, None, None] * 16
    ptrs = ptr + tl.arange(0, 16)[None, None, :, None] + halves
    ptrs += places[:, None, None, None]
    even = tl.load(ptrs)
    if BOUNDED:
        steps = tl.where(evens < last, key_stride // 4, 0)
        odd = tl.load(ptrs + steps[:, None, None, None])
    else:
        odd = tl.load(ptrs + key_stride // 4)
    PAIRS: tl.constexpr = keys.shape[0]
    return tl.reshape(even, [PAIRS, 32]), tl.reshape(odd, [PAIRS, 32])


@triton.jit
def load_key_pairs(
    store, keys, last, pages, page_stride, key_stride, kv_head, table_ptr,
    FORMAT: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """A tile [2 * pairs, 128] of keys as float16."""
    even, odd = load_pair_words(
        store, keys, last, pages, page_stride, key_stride, kv_head, table_ptr, False, C
    )
    tile = join_rows(halves_of_words(even, FORMAT, C), halves_of_words(odd, FORMAT, C))
    return permute_dims(tile, True)


@triton.jit
def halves_of_words(words, FORMAT: tl.constexpr, C: tl.constexpr):
    """A tile [keys, dims] of float16 numbers from words [keys, dims / 4] of codes."""
    if FORMAT.is_fp8:
        a, b, c, d = halves_of_e4m3(words, C.source.packed and C.source.native_fp8)
    else:
        a, b, c, d = halves_of_int8(words, C.source.packed)
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [words.shape[0], 4 * words.shape[1]])


@triton.jit
def load_value_pairs(
    store, keys, last, pages, page_stride, key_stride, kv_head, table_ptr,
    FORMAT: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """A tile [2 * pairs, 128] of values as float16, in the order of `order_weights`."""
    PAIRS: tl.constexpr = keys.shape[0]
    even, odd = load_pair_words(
        store, keys, last, pages, page_stride, key_stride, kv_head, table_ptr, FORMAT.is_fp8, C
    )
    PACKED: tl.constexpr = C.source.packed and (C.source.native_fp8 or not FORMAT.is_fp8)
    a, e, b, f, c, g, d, h = transposed_halves(even, odd, FORMAT.is_fp8, PACKED)
    a, b, c, d = tl.join(a, e), tl.join(b, f), tl.join(c, g), tl.join(d, h)
    tile = tl.join(tl.join(a, c), tl.join(b, d))  # pair, word, key of two, dim of four
    tile = tl.reshape(tile, [PAIRS // 8, 2, 4, 4, 8, 2, 2, 2])
    tile = tl.permute(tile, [6, 3, 7, 4, 0, 2, 1, 5])
    return tl.trans(tl.reshape(tile, [WIDTH, 2 * PAIRS]))


@triton.jit
def load_pair_scales(
    store, strides, keys, last, pages, kv_head, table_ptr, BY_KEY: tl.constexpr, C: tl.constexpr
):
    """The scale of each key in the order of `pair_rows`, or None; any number after the last key."""
    scales = None
    if BY_KEY:
        keys = tl.minimum(keys, last // 2 * 2)
        places = key_offsets(keys, pages, strides[0], strides[1], table_ptr, C)
        if strides[0] % 2 == 0 and strides[1] % 2 == 1:
            places = tl.multiple_of(places, 2)
        ptr = store.scales.ptr + head_offset(store, strides, kv_head)
        both = tl.arange(0, 2)[None, :]
        scales = tl.load(ptr + places[:, None] + both * strides[1])
        PAIRS: tl.constexpr = keys.shape[0]
        scales = tl.permute(tl.reshape(scales, [PAIRS // 8, 8, 2]), [0, 2, 1])
        scales = tl.reshape(scales, [2 * PAIRS])
    return scales
