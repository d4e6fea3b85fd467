/* Vectors of 64 bytes: four codes for each of 16 outputs, and their products with four inputs.
   They are taken in pieces of what the machine has: 64, 32 or 16 bytes, or one output's four. */
#include "vectors.h"

#if defined(__AVX512BW__) && defined(__AVX512VNNI__)
#include <immintrin.h>
#define MOST_ROWS 8 /* at a time, for which there are registers */
typedef __m512i piece, sums_piece;

INLINE piece take_bits(piece from, const int shift, const int mask) {
  return _mm512_and_si512(_mm512_srli_epi16(from, shift), _mm512_set1_epi8((char)mask));
}
INLINE piece put_above(piece low, piece bits) {
  return _mm512_or_si512(low, _mm512_slli_epi16(bits, 4));
}
INLINE piece look_up_piece(const uint8_t *table, piece codes) {
  __m128i once = _mm_loadu_si128((const __m128i *)table);
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(once), codes);
}
INLINE sums_piece dot_piece(sums_piece sums, piece codes, int32_t x, const int wide) {
  (void)wide;
  return _mm512_dpbusd_epi32(sums, codes, _mm512_set1_epi32(x));
}

#elif defined(__AVX2__)
#include <immintrin.h>
#define MOST_ROWS 4
typedef __m256i piece, sums_piece;

INLINE piece take_bits(piece from, const int shift, const int mask) {
  return _mm256_and_si256(_mm256_srli_epi16(from, shift), _mm256_set1_epi8((char)mask));
}
INLINE piece put_above(piece low, piece bits) {
  return _mm256_or_si256(low, _mm256_slli_epi16(bits, 4));
}
INLINE piece look_up_piece(const uint8_t *table, piece codes) {
  __m128i once = _mm_loadu_si128((const __m128i *)table);
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(once), codes);
}
INLINE sums_piece dot_piece(sums_piece sums, piece codes, int32_t four, const int wide) {
  __m256i x = _mm256_set1_epi32(four);
#if defined(__AVXVNNI__)
  (void)wide;
  return _mm256_dpbusd_avx_epi32(sums, codes, x);
#else /* pairs are summed in 16 bits, which codes of 8 bits would overflow: their top bits apart */
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i low = wide ? take_bits(codes, 0, 127) : codes;
  sums = _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(low, x), ones));
  if (!wide) return sums;
  __m256i tops = _mm256_maddubs_epi16(take_bits(codes, 7, 1), x);
  return _mm256_add_epi32(sums, _mm256_madd_epi16(tops, _mm256_set1_epi16(128)));
#endif
}

#elif defined(__ARM_FEATURE_DOTPROD) && defined(__aarch64__)
#include <arm_neon.h>
#define MOST_ROWS 4
typedef uint8x16_t piece;
typedef int32x4_t sums_piece;

INLINE piece take_bits(piece from, const int shift, const int mask) {
  return vandq_u8(vshlq_u8(from, vdupq_n_s8((int8_t)-shift)), vdupq_n_u8((uint8_t)mask));
}
INLINE piece put_above(piece low, piece bits) { return vorrq_u8(low, vshlq_n_u8(bits, 4)); }
INLINE piece look_up_piece(const uint8_t *table, piece codes) {
  return vqtbl1q_u8(vld1q_u8(table), codes);
}
INLINE sums_piece dot_piece(sums_piece sums, piece codes, int32_t four, const int wide) {
  int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(four));
#if defined(__ARM_FEATURE_MATMUL_INT8)
  (void)wide;
  return vusdotq_s32(sums, codes, x);
#else /* both are signed: codes of 8 bits less 128, which two products with 64 give back */
  if (!wide) return vdotq_s32(sums, vreinterpretq_s8_u8(codes), x);
  sums = vdotq_s32(sums, vreinterpretq_s8_u8(veorq_u8(codes, vdupq_n_u8(128))), x);
  return vdotq_s32(vdotq_s32(sums, vdupq_n_s8(64), x), vdupq_n_s8(64), x);
#endif
}

#else
#define MOST_ROWS 1
typedef uint32_t piece;
typedef int32_t sums_piece;

INLINE piece take_bits(piece from, const int shift, const int mask) {
  return from >> shift & (uint32_t)mask * 0x01010101u;
}
INLINE piece put_above(piece low, piece bits) { return low | bits << 4; }
INLINE piece look_up_piece(const uint8_t *table, piece codes) {
  piece found = 0;
  for (int i = 0; i < 32; i += 8) found |= (uint32_t)table[codes >> i & 15] << i;
  return found;
}
INLINE sums_piece dot_piece(sums_piece sums, piece codes, int32_t x, const int wide) {
  (void)wide;
  for (int i = 0; i < 32; i += 8) sums += (int32_t)(codes >> i & 255) * (int8_t)((uint32_t)x >> i);
  return sums;
}
#endif

#define NUM_PIECES ((int)(64 / sizeof(piece)))
#define EACH_PIECE(i) _Pragma("GCC unroll 4") for (int i = 0; i < NUM_PIECES; i++)

typedef struct {
  piece each[64 / sizeof(piece)];
} bytes;

typedef union {
  ivec whole;
  sums_piece each[64 / sizeof(piece)];
} sums;

INLINE bytes load_bytes(const uint8_t *from) {
  bytes to;
  __builtin_memcpy(&to, from, sizeof(to));
  return to;
}

INLINE bytes bits_of(bytes from, const int shift, const int mask) {
  EACH_PIECE(i) from.each[i] = take_bits(from.each[i], shift, mask);
  return from;
}

INLINE bytes with_high_bits(bytes low, bytes bits) {
  EACH_PIECE(i) low.each[i] = put_above(low.each[i], bits.each[i]);
  return low;
}

/* Bytes of a table of 16, by codes below 16. */
INLINE bytes look_up(const uint8_t *table, bytes codes) {
  EACH_PIECE(i) codes.each[i] = look_up_piece(table, codes.each[i]);
  return codes;
}

/* to[i] + codes[4 i .. 4 i + 3] . x, four signed bytes. Codes are below 128 unless `wide`. */
INLINE sums dot(sums to, bytes codes, int32_t x, const int wide) {
  EACH_PIECE(i) to.each[i] = dot_piece(to.each[i], codes.each[i], x, wide);
  return to;
}

typedef uint32_t uvec __attribute__((vector_size(64), aligned(4), may_alias));
typedef int8_t signed_sixteen __attribute__((vector_size(16), aligned(1), may_alias));

INLINE sums splat_int(int32_t value) { return (sums){value - (ivec){0}}; }
INLINE vec to_floats(ivec values) { return __builtin_convertvector(values, vec); }

/* 16 unsigned bytes, 16 signed ones, 16 numbers of IEEE's 16 bits, 16 of bfloat16. */
#if defined(__AVX512F__)
INLINE vec from_bytes(const uint8_t *from) {
  return to_floats((ivec)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from)));
}
INLINE vec from_signed_bytes(const uint8_t *from) {
  return to_floats((ivec)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
}
INLINE vec from_halves(const uint8_t *from) {
  return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
}
INLINE vec from_bfloats(const uint8_t *from) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
  return (vec)_mm512_slli_epi32(wide, 16);
}
#else
INLINE vec from_bytes(const uint8_t *from) {
  vec to = {0};
  for (int i = 0; i < LANES; i++) to[i] = from[i];
  return to;
}
INLINE vec from_signed_bytes(const uint8_t *from) {
  vec to = {0};
  for (int i = 0; i < LANES; i++) to[i] = (int8_t)from[i];
  return to;
}
INLINE vec from_bfloats(const uint8_t *from) {
  uvec to = {0};
  for (int i = 0; i < LANES; i++) to[i] = (from[2 * i] | (uint32_t)from[2 * i + 1] << 8) << 16;
  return (vec)to;
}
#if defined(__F16C__)
INLINE vec from_halves(const uint8_t *from) {
  union { vec whole; __m256 half[2]; } to;
  for (int i = 0; i < 2; i++)
    to.half[i] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + 16 * i)));
  return to.whole;
}
#else
INLINE vec from_halves(const uint8_t *from) {
  vec to = {0};
  for (int i = 0; i < LANES; i++) {
    uint32_t half = from[2 * i] | (uint32_t)from[2 * i + 1] << 8, size = half & 0x7fff;
    union { uint32_t bits; float value; } normal = {(size << 13) + (112u << 23)};
    if (size >= 0x7c00) normal.bits += 112u << 23; /* infinities and NaNs */
    float value = size < 0x400 ? size * 0x1p-24f : normal.value;
    to[i] = half & 0x8000 ? -value : value;
  }
  return to;
}
#endif
#endif
