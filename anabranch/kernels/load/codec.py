"""Store formats inside a kernel: codes to numbers and back."""

import triton
import triton.language as tl

LARGEST_E4M3: tl.constexpr = tl.constexpr(448.0)
LARGEST_INT8: tl.constexpr = tl.constexpr(127.0)
LARGEST_HALF: tl.constexpr = tl.constexpr(65504.0)
SMALLEST_NORMAL: tl.constexpr = tl.constexpr(2.0**-126)
# Adding and subtracting it rounds a float32 below 2^22 to the nearest integer, ties to even.
ROUNDER: tl.constexpr = tl.constexpr(1.5 * 2.0**23)


@triton.jit
def from_e4m3(codes):
    """The numbers of e4m3 codes in bytes, exactly, as float16: the same bits after a shift, times
    2^8 for the other bias. A code of NaN, which `to_e4m3` never writes, reads as 480.
    """
    bits = codes.to(tl.uint16)
    half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    return half.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def to_e4m3(x):
    """The bytes of the nearest e4m3 codes of float32 numbers up to 448, ties to even."""
    bits = x.to(tl.uint32, bitcast=True)
    size = tl.abs(x)
    magnitude = bits & 0x7FFFFFFF
    # 20 of 23 bits are rounded away, and the exponent's bias falls by 120
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
    subnormal = ((size * 512.0 + ROUNDER) - ROUNDER).to(tl.int32).to(tl.uint32)
    code = tl.where(size < 0.015625, subnormal, normal)
    return (((bits >> 24) & 0x80) | code).to(tl.uint8)


@triton.jit
def round_half_away(x):
    """C's roundf."""
    size = tl.abs(x)
    floor = tl.floor(size)
    rounded = floor + tl.floor(2.0 * (size - floor))
    return tl.where(x < 0, -rounded, rounded)


@triton.jit
def decode_tile(codes, scales, DTYPE: tl.constexpr, SCALED: tl.constexpr):
    """A tile [keys, dims] of codes in a dtype; SCALED by scales [keys, blocks].

    Bytes are codes of e4m3, for a GPU that has no such type.
    """
    numbers = from_e4m3(codes) if codes.dtype == tl.uint8 else codes
    if SCALED:
        KEYS: tl.constexpr = codes.shape[0]
        WIDTH: tl.constexpr = codes.shape[1]
        BLOCKS: tl.constexpr = scales.shape[1]
        blocks = tl.reshape(numbers.to(tl.float32), [KEYS, BLOCKS, WIDTH // BLOCKS])
        numbers = tl.reshape(blocks * scales.to(tl.float32)[:, :, None], [KEYS, WIDTH])
    return numbers.to(DTYPE)


@triton.jit
def encode_rows(rows, scale, FORMAT: tl.constexpr):
    """Rows [ROWS, DIMS] as codes, their scales [ROWS, blocks], and how many elements saturated.

    `scale` is that of a tensor, where the format has one. What is said of `keys.formats.encode`
    holds here, bit for bit; divisions are IEEE's for that.
    """
    ROWS: tl.constexpr = rows.shape[0]
    WIDTH: tl.constexpr = rows.shape[1]
    BLOCKS: tl.constexpr = WIDTH // FORMAT.block if FORMAT.scaling == "block" else 1
    LARGEST: tl.constexpr = LARGEST_E4M3 if FORMAT.is_fp8 else LARGEST_INT8
    x = tl.reshape(rows.to(tl.float32), [ROWS, BLOCKS, WIDTH // BLOCKS])
    finite = tl.abs(x) < float("inf")  # false for NaN
    if FORMAT.scaling == "tensor":
        scales = tl.zeros([ROWS, BLOCKS], tl.float32) + scale
    else:
        scales = tl.max(tl.where(finite, tl.abs(x), 0.0), 2)
        scales = tl.div_rn(scales, tl.full([ROWS, BLOCKS], LARGEST, tl.float32))
    normal = scales >= SMALLEST_NORMAL  # a smaller one has no inverse
    ones = tl.full([ROWS, BLOCKS], 1.0, tl.float32)
    inverse = tl.where(normal, tl.div_rn(ones, tl.where(normal, scales, 1.0)), 0.0)
    scaled = tl.where(finite, x * inverse[:, :, None], x)
    beyond = finite == 0
    if FORMAT.scaling == "tensor":
        beyond = beyond | (tl.abs(scaled) > LARGEST)
    scaled = tl.where(scaled == scaled, scaled, 0.0)  # noqa: PLR0124 (NaN becomes 0)
    scaled = tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST)
    codes = to_e4m3(scaled) if FORMAT.is_fp8 else round_half_away(scaled).to(tl.int8)
    if FORMAT.scaling == "block":
        scales = tl.minimum(scales, LARGEST_HALF)
    num_beyond = tl.sum(tl.reshape(beyond.to(tl.int32), [ROWS * WIDTH]), 0)
    return tl.reshape(codes, [ROWS, WIDTH]), scales, num_beyond
