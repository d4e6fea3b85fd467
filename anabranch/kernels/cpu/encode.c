/* New rows of float32 numbers into a quantised cache: the codes and scales of keys/formats.py. */
#include <float.h>
#include <string.h>
#include "vectors.h"

#define MAX_WIDTH 1024 /* numbers that share a scale */

enum { INT8 = 1, E4M3 }; /* as pages.h has them */

struct sink {
  uint8_t *codes;
  long page, row, head; /* strides */
  void *scales;
  long scale_page, scale_row, scale_head, scale_block; /* strides */
  long format, has_half_scales, is_fixed; /* one scale for all, which is given */
  long block;                             /* numbers that share a scale */
};

INLINE uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

/* To the nearest whole number below 2^22, ties to even. */
INLINE uint32_t nearest(float value) { return bits_of(value + 0x1.8p23f) - bits_of(0x1.8p23f); }

/* Of a scale, which is finite and not negative; at most the largest half. */
INLINE uint16_t to_half(float scale) {
  scale = scale < 65504.f ? scale : 65504.f;
  if (scale < 0x1p-14f) return (uint16_t)nearest(scale * 0x1p24f);
  uint32_t bits = bits_of(scale);
  return (uint16_t)(((bits + 0xfff + (bits >> 13 & 1)) >> 13) - (112u << 10));
}

/* Of a number within 448, ties to even. */
INLINE uint8_t to_e4m3(float value) {
  uint32_t bits = bits_of(value), size = bits & 0x7fffffff;
  uint32_t normal = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120u << 3);
  uint32_t small = nearest(fabsf(value) * 512.f);
  return (uint8_t)((size < 121u << 23 ? small : normal) | (bits >> 24 & 0x80));
}

/* To the nearest, ties away from zero: the summand is the float below a half. */
INLINE int8_t to_int8(float value) { return (int8_t)(value + copysignf(0x1.fffffep-2f, value)); }

INLINE float largest_finite(const float *from, long count) {
  float top = 0;
  for (long i = 0; i < count; i++) {
    float size = fabsf(from[i]);
    top = size <= FLT_MAX && size > top ? size : top;
  }
  return top;
}

/* Codes of numbers that share a scale; how many saturated. */
static long encode_block(const float *from, long count, float scale, const struct sink *sink,
                         uint8_t *to) {
  float scaled[MAX_WIDTH], largest = sink->format == INT8 ? 127.f : 448.f;
  float inverse = scale < FLT_MIN ? 0 : 1 / scale; /* a subnormal scale has none */
  long beyond = 0;
  for (long i = 0; i < count; i++) {
    int is_finite = fabsf(from[i]) <= FLT_MAX;
    float value = is_finite ? from[i] * inverse : from[i];
    value = value == value ? value : 0;
    beyond += !is_finite || (sink->is_fixed && fabsf(value) > largest);
    value = value > largest ? largest : value;
    scaled[i] = value < -largest ? -largest : value;
  }
  if (sink->format == INT8)
    for (long i = 0; i < count; i++) to[i] = (uint8_t)to_int8(scaled[i]);
  else
    for (long i = 0; i < count; i++) to[i] = to_e4m3(scaled[i]);
  return beyond;
}

static long encode_row(const float *from, long dim, long slot, long head, long page_size,
                       const struct sink *sink) {
  long page = slot / page_size, row = slot % page_size, beyond = 0;
  uint8_t *codes = sink->codes + page * sink->page + row * sink->row + head * sink->head;
  long at = page * sink->scale_page + row * sink->scale_row + head * sink->scale_head;
  for (long i = 0; i < dim; i += sink->block, at += sink->scale_block) {
    float scale = sink->is_fixed ? *(const float *)sink->scales
                                 : largest_finite(from + i, sink->block) /
                                       (sink->format == INT8 ? 127.f : 448.f);
    beyond += encode_block(from + i, sink->block, scale, sink, codes + i);
    if (sink->is_fixed) continue;
    if (sink->has_half_scales)
      ((uint16_t *)sink->scales)[at] = to_half(scale);
    else
      ((float *)sink->scales)[at] = scale;
  }
  return beyond;
}

/* Write the rows of every token [tokens, heads, dim] to its slot; negative slots are skipped.
   Returns how many numbers saturated, or -1 - a token whose slot is not in the cache. */
long encode_rows(const float *rows, const int64_t *slots, void *codes, void *scales,
                 const int64_t *sizes, int num_threads) {
  const int64_t *s = sizes;
  struct sink sink = {codes, s[2], s[3], s[4], scales, s[5], s[6], s[7], s[8],
                      s[9],  s[10], s[11], s[12]};
  long num_tokens = s[13], num_heads = s[14], dim = s[15], page_size = s[17], beyond = 0;
  for (long token = 0; token < num_tokens; token++)
    if (slots[token] >= s[16] * page_size) return -1 - token;
#pragma omp parallel for collapse(2) reduction(+ : beyond) num_threads(num_threads) \
    if (num_tokens * num_heads * dim >= MIN_PARALLEL)
  for (long token = 0; token < num_tokens; token++)
    for (long head = 0; head < num_heads; head++)
      if (slots[token] >= 0)
        beyond += encode_row(rows + token * s[0] + head * s[1], dim, slots[token], head,
                             page_size, &sink);
  return beyond;
}
