"""Codes of 8 bits, loaded and converted four at a time.

A tile of them is float16: it holds e4m3 and int8 exactly, and pairs of halves are converted by one
instruction. Queries are then float16 too, in units of their rows.
"""

import triton
import triton.language as tl

from anabranch.kernels.load.addressing import dim_ptrs, key_offsets
from anabranch.kernels.load.codec import from_e4m3
from anabranch.keys import KeyStore


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
def halves_of_int8(words, PACKED: tl.constexpr):
    """The four int8 codes of each word as float16, lowest byte first."""
    if PACKED:
        # 0x6400 | x is the half 1024 + x, for a code with its sign bit turned over
        return tl.inline_asm_elementwise(
            """{ .reg .b32 codes, magic, low, high;
            xor.b32 codes, $4, 0x80808080;
            mov.b32 magic, 0x64646464;
            prmt.b32 low, codes, magic, 0x4140;
            prmt.b32 high, codes, magic, 0x4342;
            mov.b32 magic, 0x64806480;
            sub.f16x2 low, low, magic;
            sub.f16x2 high, high, magic;
            mov.b32 {$0, $1}, low;
            mov.b32 {$2, $3}, high; }""",
            "=h,=h,=h,=h,r",
            [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=1,
        )
    else:
        return (
            ((words << 24) >> 24).to(tl.float16),
            ((words << 16) >> 24).to(tl.float16),
            ((words << 8) >> 24).to(tl.float16),
            (words >> 24).to(tl.float16),
        )


@triton.jit
def scaled_halves_of_int8(words, scales, PACKED: tl.constexpr):
    """The four int8 codes of each word times its float16 scale."""
    if PACKED:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 codes, magic, low, high, scale;
            xor.b32 codes, $4, 0x80808080;
            mov.b32 magic, 0x64646464;
            prmt.b32 low, codes, magic, 0x4140;
            prmt.b32 high, codes, magic, 0x4342;
            mov.b32 magic, 0x64806480;
            sub.f16x2 low, low, magic;
            sub.f16x2 high, high, magic;
            mov.b32 scale, {$5, $5};
            mul.f16x2 low, low, scale;
            mul.f16x2 high, high, scale;
            mov.b32 {$0, $1}, low;
            mov.b32 {$2, $3}, high; }""",
            "=h,=h,=h,=h,r,h",
            [words, scales],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=1,
        )
    else:
        a, b, c, d = halves_of_int8(words, False)
        return a * scales, b * scales, c * scales, d * scales


@triton.jit
def halves_of_e4m3(words, PACKED: tl.constexpr):
    """The four e4m3 codes of each word as float16, lowest byte first."""
    if PACKED:
        return tl.inline_asm_elementwise(
            """{ .reg .b16 first, second; .reg .b32 low, high;
            mov.b32 {first, second}, $4;
            cvt.rn.f16x2.e4m3x2 low, first;
            cvt.rn.f16x2.e4m3x2 high, second;
            mov.b32 {$0, $1}, low;
            mov.b32 {$2, $3}, high; }""",
            "=h,=h,=h,=h,r",
            [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=1,
        )
    else:
        return (
            from_e4m3(words & 0xFF),
            from_e4m3((words >> 8) & 0xFF),
            from_e4m3((words >> 16) & 0xFF),
            from_e4m3((words >> 24) & 0xFF),
        )


@triton.jit
def transposed_halves(even, odd, IS_FP8: tl.constexpr, PACKED: tl.constexpr):
    """The codes of words of two keys as float16: the first code of each key, then the second, ...

    Two keys share a register, as the matrix unit takes a tile whose rows are dims.
    """
    if PACKED and IS_FP8:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 low, high; .reg .b16 first, second, third, fourth;
            prmt.b32 low, $8, $9, 0x5140;
            prmt.b32 high, $8, $9, 0x7362;
            mov.b32 {first, second}, low;
            mov.b32 {third, fourth}, high;
            cvt.rn.f16x2.e4m3x2 low, first;
            mov.b32 {$0, $1}, low;
            cvt.rn.f16x2.e4m3x2 low, second;
            mov.b32 {$2, $3}, low;
            cvt.rn.f16x2.e4m3x2 low, third;
            mov.b32 {$4, $5}, low;
            cvt.rn.f16x2.e4m3x2 low, fourth;
            mov.b32 {$6, $7}, low; }""",
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
            [even, odd],
            dtype=(tl.float16,) * 8,
            is_pure=True,
            pack=1,
        )
    elif PACKED:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 low, high, magic, bias, pair;
            prmt.b32 low, $8, $9, 0x5140;
            prmt.b32 high, $8, $9, 0x7362;
            xor.b32 low, low, 0x80808080;
            xor.b32 high, high, 0x80808080;
            mov.b32 magic, 0x64646464;
            mov.b32 bias, 0x64806480;
            prmt.b32 pair, low, magic, 0x4140;
            sub.f16x2 pair, pair, bias;
            mov.b32 {$0, $1}, pair;
            prmt.b32 pair, low, magic, 0x4342;
            sub.f16x2 pair, pair, bias;
            mov.b32 {$2, $3}, pair;
            prmt.b32 pair, high, magic, 0x4140;
            sub.f16x2 pair, pair, bias;
            mov.b32 {$4, $5}, pair;
            prmt.b32 pair, high, magic, 0x4342;
            sub.f16x2 pair, pair, bias;
            mov.b32 {$6, $7}, pair; }""",
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
            [even, odd],
            dtype=(tl.float16,) * 8,
            is_pure=True,
            pack=1,
        )
    else:
        if IS_FP8:
            a, b, c, d = halves_of_e4m3(even, False)
            e, f, g, h = halves_of_e4m3(odd, False)
        else:
            a, b, c, d = halves_of_int8(even, False)
            e, f, g, h = halves_of_int8(odd, False)
        return a, e, b, f, c, g, d, h


@triton.jit
def permute_dims(x, NARROW: tl.constexpr):
    """Dims in the order in which a thread's 16 bytes of codes are its operands of four products.

    The matrix unit gives a thread dims 2t, 2t + 1, 2t + 8 and 2t + 9 of 16, for t in 0 to 3; and
    NARROW, for fewer than 16 rows, 4t to 4t + 3.
    """
    ROWS: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    if NARROW:
        x = tl.permute(tl.reshape(x, [ROWS, WIDTH // 64, 4, 4, 4]), [0, 1, 3, 2, 4])
    else:
        x = tl.permute(tl.reshape(x, [ROWS, WIDTH // 64, 4, 4, 2, 2]), [0, 1, 3, 4, 2, 5])
    return tl.reshape(x, [ROWS, WIDTH])


@triton.jit
def decode_words(
    words, scales, IS_FP8: tl.constexpr, PERMUTED: tl.constexpr,
    PACKED: tl.constexpr, NATIVE_FP8: tl.constexpr,
):  # fmt: skip
    """A tile [keys, dims] of float16 numbers from words [keys, dims / 4] of codes.

    Numbers are multiplied by float16 scales [keys, blocks] where there are some.
    """
    KEYS: tl.constexpr = words.shape[0]
    WORDS: tl.constexpr = words.shape[1]
    if scales is not None:
        BLOCKS: tl.constexpr = scales.shape[1]
        wide = tl.broadcast_to(scales[:, :, None], [KEYS, BLOCKS, WORDS // BLOCKS])
        a, b, c, d = scaled_halves_of_int8(words, tl.reshape(wide, [KEYS, WORDS]), PACKED)
    elif IS_FP8:
        a, b, c, d = halves_of_e4m3(words, PACKED and NATIVE_FP8)
    else:
        a, b, c, d = halves_of_int8(words, PACKED)
    tile = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [KEYS, WORDS * 4])
    return permute_dims(tile, False) if PERMUTED else tile


@triton.jit
def load_words(
    store, keys, pages, page_stride, key_stride, kv_head, scale_place, table_ptr,
    WIDTH: tl.constexpr, FORMAT: tl.constexpr, PERMUTED: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """A tile of codes as float16 numbers, loaded four at a time; scaled where blocks have scales.

    There a number beyond float16's range is read as one almost as large as float16 has.
    """
    ptr = tl.cast(store.ptr, tl.pointer_type(tl.int32), bitcast=True)
    ptr += kv_head.to(tl.int64) * (store.head // 4)
    places = key_offsets(keys, pages, page_stride // 4, key_stride // 4, table_ptr, C)
    if WIDTH == 128:
        # In halves: 8 threads then read or write two rows of a tile, from different banks.
        columns = ptr + tl.arange(0, 16)[None, :] + places[:, None]
        halves = tl.join(tl.load(columns), tl.load(columns + 16))
        words = tl.reshape(tl.permute(halves, [0, 2, 1]), [places.shape[0], 32])
    else:
        words = tl.load(ptr + tl.arange(0, WIDTH // 4)[None, :] + places[:, None])
    scales = None
    if FORMAT.scaling == "block":
        BLOCKS: tl.constexpr = WIDTH // FORMAT.block
        scale_ptrs = dim_ptrs(store.scales.ptr, store.scales.block, 0, BLOCKS)
        scales = tl.load(scale_ptrs + scale_place[:, None])
        scales = tl.minimum(scales, tl.full([], 511.0, tl.float16))  # times 128 float16 holds it
    return decode_words(
        words, scales, FORMAT.is_fp8, PERMUTED, C.source.packed, C.source.native_fp8
    )
