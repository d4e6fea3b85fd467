"""Codes of 8 bits, loaded and converted four at a time.

A tile of them is float16: it holds e4m3 and int8 exactly, and pairs of halves are converted by one
instruction. Queries are then float16 too, in units of their rows.
"""

import triton
import triton.language as tl

from anabranch.kernels.load.addressing import dim_ptrs, key_offsets, scale_offsets
from anabranch.kernels.load.code_halves import (
    halves_of_e4m3,
    halves_of_int8,
    scaled_halves_of_int8,
)
from anabranch.keys import KeyStore, KeyView


def words_of(view: KeyView, itemsize: int) -> tuple[bool, bool]:
    """Whether codes of keys, and of values, are loaded four at a time, for such queries."""
    may = itemsize == 2 and not view.values_in_keys
    return may and in_words(view.k), may and in_words(view.v)


def in_words(store: KeyStore) -> bool:
    """Whether the codes of a store can be loaded four at a time."""
    ptr = store.ptr
    if ptr.element_size() != 1 or store.dim != 1 or ptr.shape[-1] & (ptr.shape[-1] - 1):
        return False
    places = (store.page, store.key, store.head, ptr.storage_offset())
    return ptr.shape[-1] >= 64 and not any(place % 16 for place in places)


@triton.jit
def unit_of(size):
    """The power of two not above a float32, within 2^-100 and 2^126, and its inverse."""
    bits = size.to(tl.float32).to(tl.int32, bitcast=True) & 0x7F800000
    bits = tl.minimum(tl.maximum(bits, 27 << 23), 253 << 23)
    return bits.to(tl.float32, bitcast=True), ((254 << 23) - bits).to(tl.float32, bitcast=True)


@triton.jit
def permute_dims(x, QUADS: tl.constexpr):
    """Dims in the order in which a thread's 16 bytes of codes are its operands of four products.

    The matrix unit gives a thread dims 2t, 2t + 1, 2t + 8 and 2t + 9 of 16, for t in 0 to 3; with
    QUADS, 4t to 4t + 3.
    """
    ROWS: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    if QUADS:
        x = tl.permute(tl.reshape(x, [ROWS, WIDTH // 64, 4, 4, 4]), [0, 1, 3, 2, 4])
    else:
        x = tl.permute(tl.reshape(x, [ROWS, WIDTH // 64, 4, 4, 2, 2]), [0, 1, 3, 4, 2, 5])
    return tl.reshape(x, [ROWS, WIDTH])


@triton.jit
def decode_words(words, scales, FORMAT: tl.constexpr, C: tl.constexpr):
    """A tile [keys, dims] of float16 numbers from words [keys, dims / 4] of codes.

    Numbers are multiplied by float16 scales [keys, blocks] where there are some.
    """
    KEYS: tl.constexpr = words.shape[0]
    WORDS: tl.constexpr = words.shape[1]
    PACKED: tl.constexpr = C.source.packed
    if scales is not None:
        BLOCKS: tl.constexpr = scales.shape[1]
        wide = tl.broadcast_to(scales[:, :, None], [KEYS, BLOCKS, WORDS // BLOCKS])
        a, b, c, d = scaled_halves_of_int8(words, tl.reshape(wide, [KEYS, WORDS]), PACKED)
    elif FORMAT.is_fp8:
        a, b, c, d = halves_of_e4m3(words, PACKED and C.source.native_fp8)
    else:
        a, b, c, d = halves_of_int8(words, PACKED)
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [KEYS, WORDS * 4])


@triton.jit
def word_rows(columns, SIDE: tl.constexpr):
    """Pointer to the words of a head, and strides of pages and keys in words."""
    store = columns.store
    ptr = tl.cast(store.ptr, tl.pointer_type(tl.int32), bitcast=True)
    ptr += columns.kv_head.to(tl.int64) * (store.head // 4)
    page, key = store.page, store.key
    if SIDE.strides is not None:
        page, key = SIDE.strides[0], SIDE.strides[1]
    return ptr, page // 4, key // 4


@triton.jit
def load_words(
    columns,
    at,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    DTYPE: tl.constexpr,
    SIDE: tl.constexpr,
    C: tl.constexpr,
):
    """A tile of codes as float16 numbers, loaded four at a time; scaled where blocks have scales.

    There a number beyond float16's range is read as one almost as large as float16 has. Dims of
    keys are in the order of `permute_dims`.
    """
    scale_places = scale_offsets(columns, at, SIDE, C)
    ptr, page, key = word_rows(columns, SIDE)
    places = key_offsets(at.looked_up, at.pages, page, key, C)
    if WIDTH == 128:
        # In halves: 8 threads then read or write two rows of a tile, from different banks.
        halves = ptr + tl.arange(0, 16)[None, :] + places[:, None]
        halves = tl.join(tl.load(halves), tl.load(halves + 16))
        words = tl.reshape(tl.permute(halves, [0, 2, 1]), [places.shape[0], 32])
    else:
        words = tl.load(ptr + tl.arange(0, WIDTH // 4)[None, :] + places[:, None])
    scales = None
    FORMAT: tl.constexpr = SIDE.format
    if FORMAT.scaling == "block":
        BLOCKS: tl.constexpr = WIDTH // FORMAT.block
        store = columns.store
        scale_ptrs = dim_ptrs(store.scales.ptr, store.scales.block, 0, BLOCKS)
        scales = tl.load(scale_ptrs + scale_places[:, None])
        scales = tl.minimum(scales, tl.full([], 511.0, tl.float16))  # times 128 float16 holds it
    tile = decode_words(words, scales, FORMAT, C)
    if not SIDE.has_values:
        tile = permute_dims(tile, False)
    return tile, scale_places
