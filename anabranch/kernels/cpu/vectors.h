/* Vectors of 16 floats in the compiler's own notation: AVX-512, AVX2 and NEON from one source. */
#include <math.h>
#include <stdint.h>

#define LANES 16
#define MIN_PARALLEL 65536 /* elements of simple work from which a second thread pays */
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(64), aligned(4), may_alias));

INLINE vec load(const float *from) { return *(const vec *)from; }
INLINE void store(float *to, vec value) { *(vec *)to = value; }
INLINE vec splat(float value) { return value - (vec){0}; }

INLINE vec choose(ivec condition, vec yes, vec no) {
  return (vec)((condition & (ivec)yes) | (~condition & (ivec)no));
}

/* Of two numbers, the second where one is NaN. */
#if defined(__AVX512F__)
#include <immintrin.h>
INLINE vec larger(vec a, vec b) { return (vec)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vec smaller(vec a, vec b) { return (vec)_mm512_min_ps((__m512)a, (__m512)b); }
#else
INLINE vec larger(vec a, vec b) { return choose(a > b, a, b); }
INLINE vec smaller(vec a, vec b) { return choose(a < b, a, b); }
#endif

typedef float vec8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef float vec4 __attribute__((vector_size(16), aligned(4), may_alias));

INLINE float sum_lanes(vec v) {
  vec8 eight = *(vec8 *)&v + *((vec8 *)&v + 1);
  vec4 four = *(vec4 *)&eight + *((vec4 *)&eight + 1);
  return (four[0] + four[2]) + (four[1] + four[3]);
}

INLINE float max_lanes(vec v) {
  float max = v[0];
  for (int i = 1; i < LANES; i++) max = v[i] > max ? v[i] : max;
  return max;
}

/* Of the bits of floats that are not negative, whose order is that of the numbers: infinities are
   larger, NaNs the largest. */
#if defined(__AVX512F__)
INLINE ivec larger_bits(ivec a, ivec b) { return (ivec)_mm512_max_epi32((__m512i)a, (__m512i)b); }
INLINE int32_t most_bits(ivec v) { return _mm512_reduce_max_epi32((__m512i)v); }
#else
INLINE ivec larger_bits(ivec a, ivec b) { return ((a > b) & a) | ((a <= b) & b); }
INLINE int32_t most_bits(ivec v) {
  int32_t most = v[0];
  for (int i = 1; i < LANES; i++) most = v[i] > most ? v[i] : most;
  return most;
}
#endif
INLINE float max_bits(ivec v) {
  union { int32_t bits; float value; } most = {most_bits(v)};
  return most.value;
}

/* exp(x) = 2^n exp(r) with |r| <= ln(2) / 2, where the series up to r^7 is exact to 1e-8.
   Below -88 the result is 0, above 88 a large number. */
INLINE vec exp_lanes(vec x) {
  const float log2_e = 1.44269504f, ln2_high = 0.693145752f, ln2_low = 1.42860677e-6f;
  const float whole_numbers = 0x1.8p23f; /* the sum of a number and this is rounded to one */
  x = smaller(splat(88.f), larger(splat(-88.f), x));
  vec n = x * log2_e + whole_numbers, whole = n - whole_numbers;
  vec r = x - whole * ln2_high - whole * ln2_low;
  vec p = splat(1.f / 5040);
  p = p * r + 1.f / 720;
  p = p * r + 1.f / 120;
  p = p * r + 1.f / 24;
  p = p * r + 1.f / 6;
  p = p * r + .5f;
  p = p * r + 1.f;
  p = p * r + 1.f;
  return p * (vec)(((ivec)n + 127) << 23); /* 0 where n is -127 */
}
