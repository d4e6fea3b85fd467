"""Tiles of codes of 8 bits loaded by pairs of neighbouring keys, 128 dims wide, for few rows.

Both tiles are made in registers as the matrix unit takes them: a thread has two keys of a tile of
keys, and pairs of keys of the transposed tile of values. A page and a place are looked up for each
pair. Rows of a tile of keys are in the order of `pair_rows`, sums over values in that of
`permute_sums`. The orders are those of products with 8 columns, which halve what 16 compute.
"""

from __future__ import annotations

import triton
import triton.language as tl

from anabranch.kernels.load.addressing import head_offset, key_offsets, scaled_by_key
from anabranch.kernels.load.code_halves import transposed_halves
from anabranch.kernels.load.packed_codes import decode_words, permute_dims, word_rows, words_of
from anabranch.keys import KeyView

WIDTH: tl.constexpr = tl.constexpr(128)


def in_pairs(view: KeyView, itemsize: int = 2) -> bool:
    """Whether keys and values are codes that are loaded by pairs, for such queries."""
    stores = (view.k, view.v)
    return (
        view.page_size % 2 == 0
        and all(words_of(view, itemsize))
        and all(x.ptr.shape[-1] == WIDTH.value for x in stores)
        and all(x.format.scaling != "block" for x in stores)
    )


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
def load_pair_words(columns, at, BOUNDED: tl.constexpr, SIDE: tl.constexpr, C: tl.constexpr):
    """Words [pairs, 32] of even keys, and those of odd ones: BOUNDED, none after the last key.

    Otherwise one key after the last may be read: it lies in the same page, written or not.
    """
    ptr, page, key = word_rows(columns, SIDE)
    evens = tl.minimum(at.looked_up, at.last // 2 * 2)
    places = key_offsets(evens, at.pages, page, key, C)
    # A fourth axis: of three, Triton keeps the first one outermost in shared memory. So halves of
    # rows are next to each other there, and threads read them from different banks.
    halves = tl.arange(0, 2)[None, :, None, None] * 16
    ptrs = ptr + tl.arange(0, 16)[None, None, :, None] + halves
    ptrs += places[:, None, None, None]
    even = tl.load(ptrs)
    if BOUNDED:
        steps = tl.where(evens < at.last, key, 0)
        STRIDES: tl.constexpr = SIDE.strides
        if STRIDES is not None and STRIDES[1] % 16 == 0:
            steps = tl.multiple_of(steps, 4)  # Triton 3.9 would copy words one by one
        odd = tl.load(ptrs + steps[:, None, None, None])
    else:
        odd = tl.load(ptrs + key)
    PAIRS: tl.constexpr = at.looked_up.shape[0]
    return tl.reshape(even, [PAIRS, 32]), tl.reshape(odd, [PAIRS, 32])


@triton.jit
def load_key_pairs(
    columns,
    at,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    DTYPE: tl.constexpr,
    SIDE: tl.constexpr,
    C: tl.constexpr,
):
    """A tile [2 * pairs, 128] of keys as float16; `load_pair_scales` finds scales by itself."""
    even, odd = load_pair_words(columns, at, False, SIDE, C)
    FORMAT: tl.constexpr = SIDE.format
    tile = join_rows(decode_words(even, None, FORMAT, C), decode_words(odd, None, FORMAT, C))
    return permute_dims(tile, C.source.quads), at.keys


@triton.jit
def load_value_pairs(
    columns,
    at,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    DTYPE: tl.constexpr,
    SIDE: tl.constexpr,
    C: tl.constexpr,
):
    """A tile [2 * pairs, 128] of values as float16, in the order of `order_weights`; its scales."""
    PAIRS: tl.constexpr = at.looked_up.shape[0]
    IS_FP8: tl.constexpr = SIDE.format.is_fp8
    even, odd = load_pair_words(columns, at, IS_FP8, SIDE, C)
    PACKED: tl.constexpr = C.source.packed and (C.source.native_fp8 or not IS_FP8)
    a, e, b, f, c, g, d, h = transposed_halves(even, odd, IS_FP8, PACKED)
    a, b, c, d = tl.join(a, e), tl.join(b, f), tl.join(c, g), tl.join(d, h)
    tile = tl.join(tl.join(a, c), tl.join(b, d))  # pair, word, key of two, dim of four
    tile = tl.reshape(tile, [PAIRS // 8, 2, 4, 4, 8, 2, 2, 2])
    tile = tl.permute(tile, [6, 3, 7, 4, 0, 2, 1, 5])
    tile = tl.trans(tl.reshape(tile, [WIDTH, 2 * PAIRS]))
    scales = at.keys  # unused without scales
    if scaled_by_key(SIDE, DTYPE):
        scales = load_pair_scales(columns, at, scales, DTYPE, SIDE, C)
        scales = tl.where(at.keys <= at.last, scales, 0.0)
    return tile, scales


@triton.jit
def load_pair_scales(columns, at, places, DTYPE: tl.constexpr, SIDE: tl.constexpr, C: tl.constexpr):
    """The scale of each key in the order of `pair_rows`, or None; any number after the last key."""
    scales = None
    if scaled_by_key(SIDE, DTYPE):
        STRIDES: tl.constexpr = SIDE.scale_strides
        keys = tl.minimum(at.looked_up, at.last // 2 * 2)
        places = key_offsets(keys, at.pages, STRIDES[0], STRIDES[1], C)
        if STRIDES[0] % 2 == 0 and STRIDES[1] % 2 == 1:
            places = tl.multiple_of(places, 2)
        ptr = columns.store.scales.ptr + head_offset(columns, SIDE)
        both = tl.arange(0, 2)[None, :]
        scales = tl.load(ptr + places[:, None] + both * STRIDES[1])
        PAIRS: tl.constexpr = keys.shape[0]
        scales = tl.permute(tl.reshape(scales, [PAIRS // 8, 8, 2]), [0, 2, 1])
        scales = tl.reshape(scales, [2 * PAIRS])
    return scales


@triton.jit
def given_pair_scales(columns, at, given, DTYPE: tl.constexpr, SIDE: tl.constexpr, C: tl.constexpr):
    """The scales that `load_value_pairs` loaded with its tile, or None."""
    scales = None
    if scaled_by_key(SIDE, DTYPE):
        scales = given
    return scales
