"""Codes of weights as 16-bit floats, exactly: words of two or four codes become as many tiles.

Where a GPU has the instructions, two words are widened at a time: bits are moved to where they make
a float, and one fused product sets the exponent or takes the offset away.
"""

import triton
import triton.language as tl

from anabranch.kernels.load.codec import from_e4m3


@triton.jit
def widen_codes(words, offset, DTYPE: tl.constexpr, C: tl.constexpr):
    """The parts of runs, in the order of their columns; integers less an offset."""
    if C.kind == "int4":
        return widen_int4(words, offset, DTYPE, C.packed)
    elif C.kind == "fp8":
        return widen_e4m3(words, DTYPE, C.packed)
    else:
        return widen_int8(words, offset, DTYPE, C.packed)


@triton.jit
def widen_e4m3(words, DTYPE: tl.constexpr, PACKED: tl.constexpr):
    """The two e4m3 codes of words of 16 bits; NaN, which no weight is, reads as 480."""
    if PACKED and tl.bfloat16 == DTYPE:
        # sign, 4 bits of exponent and 3 of mantissa are 2^-120 of the number after a shift
        return tl.inline_asm_elementwise(
            """{ .reg .b32 low, high, sign, unit, none;
            mov.b32 unit, 0x7B807B80;
            mov.b32 none, 0x80008000;
            shl.b32 low, $2, 4;
            shl.b32 sign, $2, 8;
            shr.u32 high, $2, 4;
            and.b32 low, low, 0x07F007F0;
            and.b32 high, high, 0x07F007F0;
            lop3.b32 low, sign, 0x80008000, low, 0xEA;
            lop3.b32 high, $2, 0x80008000, high, 0xEA;
            fma.rn.bf16x2 $0, low, unit, none;
            fma.rn.bf16x2 $1, high, unit, none; }""",
            "=&r,=&r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    elif PACKED:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 low, high, sign, unit, none;
            mov.b32 unit, 0x5C005C00;
            mov.b32 none, 0x80008000;
            shl.b32 low, $2, 7;
            shl.b32 sign, $2, 8;
            shr.u32 high, $2, 1;
            and.b32 low, low, 0x3F803F80;
            and.b32 high, high, 0x3F803F80;
            lop3.b32 low, sign, 0x80008000, low, 0xEA;
            lop3.b32 high, $2, 0x80008000, high, 0xEA;
            fma.rn.f16x2 $0, low, unit, none;
            fma.rn.f16x2 $1, high, unit, none; }""",
            "=&r,=&r,r",
            [words],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        codes = words.to(tl.int32)
        low, high = from_e4m3(codes & 0xFF), from_e4m3((codes >> 8) & 0xFF)
        return low.to(tl.float32).to(DTYPE), high.to(tl.float32).to(DTYPE)


@triton.jit
def widen_int4(words, offset, DTYPE: tl.constexpr, PACKED: tl.constexpr):
    """The four codes of words of 16 bits, each less an offset from 0 to 16."""
    if PACKED and tl.bfloat16 == DTYPE:
        # 0x4300 | code is 128 + code
        return tl.inline_asm_elementwise(
            """{ .reg .b32 codes, one, magic;
            mov.b32 one, 0x3F803F80;
            mov.b32 magic, 0x43004300;
            lop3.b32 codes, $4, 0x000F000F, magic, 0xEA;
            fma.rn.bf16x2 $0, codes, one, $5;
            shr.u32 codes, $4, 4;
            lop3.b32 codes, codes, 0x000F000F, magic, 0xEA;
            fma.rn.bf16x2 $1, codes, one, $5;
            shr.u32 codes, $4, 8;
            lop3.b32 codes, codes, 0x000F000F, magic, 0xEA;
            fma.rn.bf16x2 $2, codes, one, $5;
            shr.u32 codes, $4, 12;
            lop3.b32 codes, codes, 0x000F000F, magic, 0xEA;
            fma.rn.bf16x2 $3, codes, one, $5; }""",
            "=&r,=&r,=&r,=&r,r,r",
            [words, (-128.0 - offset).to(tl.bfloat16)],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    elif PACKED:
        # 0x6400 | code is 1024 + code
        return tl.inline_asm_elementwise(
            """{ .reg .b32 codes, one, magic;
            mov.b32 one, 0x3C003C00;
            mov.b32 magic, 0x64006400;
            lop3.b32 codes, $4, 0x000F000F, magic, 0xEA;
            fma.rn.f16x2 $0, codes, one, $5;
            shr.u32 codes, $4, 4;
            lop3.b32 codes, codes, 0x000F000F, magic, 0xEA;
            fma.rn.f16x2 $1, codes, one, $5;
            shr.u32 codes, $4, 8;
            lop3.b32 codes, codes, 0x000F000F, magic, 0xEA;
            fma.rn.f16x2 $2, codes, one, $5;
            shr.u32 codes, $4, 12;
            lop3.b32 codes, codes, 0x000F000F, magic, 0xEA;
            fma.rn.f16x2 $3, codes, one, $5; }""",
            "=&r,=&r,=&r,=&r,r,r",
            [words, (-1024.0 - offset).to(tl.float16)],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        codes = words.to(tl.int32)
        return (
            ((codes & 15).to(tl.float32) - offset).to(DTYPE),
            (((codes >> 4) & 15).to(tl.float32) - offset).to(DTYPE),
            (((codes >> 8) & 15).to(tl.float32) - offset).to(DTYPE),
            (((codes >> 12) & 15).to(tl.float32) - offset).to(DTYPE),
        )


@triton.jit
def widen_int8(words, offset, DTYPE: tl.constexpr, PACKED: tl.constexpr):
    """The two int8 codes of words of 16 bits, less a whole offset from -128 to 127.

    A difference of more than 8 bits is rounded as the dtype does.
    """
    if PACKED and tl.bfloat16 == DTYPE:
        # 0x4B0000 before a byte is 2^23 and that byte
        return tl.inline_asm_elementwise(
            """{ .reg .b32 codes; .reg .f32 a, b, c, d;
            xor.b32 codes, $2, 0x80808080;
            prmt.b32 a, codes, 0x4B000000, 0x7440;
            prmt.b32 b, codes, 0x4B000000, 0x7442;
            prmt.b32 c, codes, 0x4B000000, 0x7441;
            prmt.b32 d, codes, 0x4B000000, 0x7443;
            sub.f32 a, a, $3;
            sub.f32 b, b, $4;
            sub.f32 c, c, $3;
            sub.f32 d, d, $4;
            cvt.rn.bf16x2.f32 $0, b, a;
            cvt.rn.bf16x2.f32 $1, d, c; }""",
            "=&r,=&r,r,f,f",
            [words, offset + 8388736.0],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        codes = words.to(tl.int32)
        low, high = (codes << 24) >> 24, codes >> 8
        return (low.to(tl.float32) - offset).to(DTYPE), (high.to(tl.float32) - offset).to(DTYPE)
