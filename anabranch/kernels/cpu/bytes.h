/* Vectors of 64 bytes: four codes for each of 16 outputs, and their products with four inputs. */
#include "vectors.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

typedef uint8_t bytes __attribute__((vector_size(64), aligned(1), may_alias));
typedef uint8_t sixteen __attribute__((vector_size(16), aligned(1), may_alias));
typedef int8_t signed_sixteen __attribute__((vector_size(16), aligned(1), may_alias));

INLINE bytes load_bytes(const uint8_t *from) { return *(const bytes *)from; }
INLINE ivec splat_int(int32_t value) { return value - (ivec){0}; }
INLINE vec to_floats(ivec values) { return __builtin_convertvector(values, vec); }

INLINE vec from_bytes(const uint8_t *from) {
  return to_floats(__builtin_convertvector(*(const sixteen *)from, ivec));
}

INLINE vec from_signed_bytes(const uint8_t *from) {
  return to_floats(__builtin_convertvector(*(const signed_sixteen *)from, ivec));
}

/* sums[i] + codes[4 i .. 4 i + 3] . x, four signed bytes. Codes below 128 unless `wide`. */
#if defined(__AVX512VNNI__)
INLINE ivec dot(ivec sums, bytes codes, int32_t x, const int wide) {
  (void)wide;
  return (ivec)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, _mm512_set1_epi32(x));
}
#elif defined(__AVX2__)
INLINE __m256i dot_half(__m256i sums, __m256i codes, __m256i x, const int wide) {
#if defined(__AVXVNNI__)
  (void)wide;
  return _mm256_dpbusd_avx_epi32(sums, codes, x);
#else /* pairs are summed in 16 bits, which codes of 8 bits would overflow: their top bits apart */
  const __m256i ones = _mm256_set1_epi16(1), low = _mm256_set1_epi8(127);
  if (!wide)
    return _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(codes, x), ones));
  __m256i top = _mm256_and_si256(_mm256_srli_epi16(codes, 7), _mm256_set1_epi8(1));
  __m256i rest = _mm256_maddubs_epi16(_mm256_and_si256(codes, low), x);
  __m256i tops = _mm256_madd_epi16(_mm256_maddubs_epi16(top, x), _mm256_set1_epi16(128));
  return _mm256_add_epi32(sums, _mm256_add_epi32(_mm256_madd_epi16(rest, ones), tops));
#endif
}
INLINE ivec dot(ivec sums, bytes codes, int32_t x, const int wide) {
  union { ivec whole; __m256i half[2]; } s = {sums};
  union { bytes whole; __m256i half[2]; } c = {codes};
  for (int i = 0; i < 2; i++)
    s.half[i] = dot_half(s.half[i], c.half[i], _mm256_set1_epi32(x), wide);
  return s.whole;
}
#elif defined(__ARM_FEATURE_DOTPROD)
INLINE ivec dot(ivec sums, bytes codes, int32_t x, const int wide) {
  union { ivec whole; int32x4_t part[4]; } s = {sums};
  union { bytes whole; uint8x16_t part[4]; } c = {codes};
  int8x16_t four = vreinterpretq_s8_s32(vdupq_n_s32(x));
  for (int i = 0; i < 4; i++) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
    (void)wide;
    s.part[i] = vusdotq_s32(s.part[i], c.part[i], four);
#else /* both are signed: codes of 8 bits less 128, which two products with 64 give back */
    uint8x16_t less = wide ? veorq_u8(c.part[i], vdupq_n_u8(128)) : c.part[i];
    s.part[i] = vdotq_s32(s.part[i], vreinterpretq_s8_u8(less), four);
    for (int twice = 0; wide && twice < 2; twice++)
      s.part[i] = vdotq_s32(s.part[i], vdupq_n_s8(64), four);
#endif
  }
  return s.whole;
}
#else
INLINE ivec dot(ivec sums, bytes codes, int32_t x, const int wide) {
  (void)wide;
  for (int i = 0; i < 4; i++) {
    int32_t each = (int8_t)((uint32_t)x >> 8 * i);
    for (int lane = 0; lane < LANES; lane++) sums[lane] += codes[4 * lane + i] * each;
  }
  return sums;
}
#endif

/* Bytes of a table of 16, by codes below 16. */
INLINE bytes look_up(const uint8_t *table, bytes codes) {
#if defined(__AVX512BW__)
  __m128i once = _mm_loadu_si128((const __m128i *)table);
  return (bytes)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(once), (__m512i)codes);
#elif defined(__AVX2__)
  union { bytes whole; __m256i half[2]; } c = {codes};
  __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
  for (int i = 0; i < 2; i++) c.half[i] = _mm256_shuffle_epi8(twice, c.half[i]);
  return c.whole;
#elif defined(__ARM_NEON) && defined(__aarch64__)
  union { bytes whole; uint8x16_t part[4]; } c = {codes};
  for (int i = 0; i < 4; i++) c.part[i] = vqtbl1q_u8(vld1q_u8(table), c.part[i]);
  return c.whole;
#else
  for (int i = 0; i < 64; i++) codes[i] = table[codes[i]];
  return codes;
#endif
}

/* 16 numbers of IEEE's 16 bits. */
INLINE vec from_halves(const uint8_t *from) {
#if defined(__AVX512F__)
  return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__F16C__)
  union { vec whole; __m256 half[2]; } to;
  for (int i = 0; i < 2; i++)
    to.half[i] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + 16 * i)));
  return to.whole;
#else
  vec to;
  for (int i = 0; i < LANES; i++) {
    uint32_t half = from[2 * i] | from[2 * i + 1] << 8, size = half & 0x7fff;
    union { uint32_t bits; float value; } normal = {(size << 13) + (112u << 23)};
    if (size >= 0x7c00) normal.bits += 112u << 23; /* infinities and NaNs */
    float value = size < 0x400 ? size * 0x1p-24f : normal.value;
    to[i] = half & 0x8000 ? -value : value;
  }
  return to;
#endif
}

typedef uint16_t shorts __attribute__((vector_size(32), aligned(1), may_alias));
typedef uint32_t uvec __attribute__((vector_size(64), aligned(4), may_alias));

/* 16 numbers of bfloat16. */
INLINE vec from_bfloats(const uint8_t *from) {
  return (vec)(__builtin_convertvector(*(const shorts *)from, uvec) << 16);
}
