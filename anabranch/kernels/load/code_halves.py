"""Words of four 8-bit codes as float16, converted two at a time where a GPU has instructions."""

import triton
import triton.language as tl

from anabranch.kernels.load.codec import from_e4m3


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
