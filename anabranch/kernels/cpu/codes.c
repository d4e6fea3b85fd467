/* Products of inputs in 8 bits with codes, in integers; scales are applied for every chunk.
   Every output is summed in the same order whatever the number of rows. */
#include <float.h>

#include "chunks.h"

#define UNROLLED(i, count) _Pragma("GCC unroll 8") for (int i = 0; i < count; i++)

/* Sums of num_rows rows with a panel, [num_rows, 16]. */
INLINE void product(const int f, const int num_rows, const struct inputs *x, const uint8_t *w,
                    long k, float *to) {
  const long tile_size = head_bytes(f) + span_of(f) / CHUNK * chunk_bytes(f);
  long chunks = k / CHUNK;
  vec total[MOST_ROWS] = {0};
  for (long at = 0; at < chunks; at += span_of(f) / CHUNK, w += tile_size) {
    struct head head = read_head(f, w);
    for (int i = 0; i < span_of(f) / CHUNK; i++) {
      struct chunk chunk;
      read_chunk(f, w, head, i, &chunk);
      UNROLLED(r, num_rows) {
        const struct inputs *in = x + r * chunks + at + i;
        const int32_t *fours = (const int32_t *)in->codes;
        int zero = zero_code(f), halves = f == Q6_K;
        sums low = splat_int(zero * in->minus[halves ? 0 : 2]);
        sums high = splat_int(halves ? zero * in->minus[1] : 0);
        UNROLLED(v, 4) {
          low = dot(low, chunk.codes[v], fours[v], zero == 128);
          high = dot(high, chunk.codes[v + 4], fours[v + 4], zero == 128);
        }
        if (!halves) low.whole += high.whole;
        vec sum = chunk.scale[0] * in->scale * to_floats(low.whole);
        if (halves) sum += chunk.scale[1] * in->scale * to_floats(high.whole);
        if (has_min(f)) sum += chunk.min * in->sum; /* which cancels much of it */
        total[r] += sum;
      }
    }
  }
  UNROLLED(r, num_rows) store(to + r * PANEL, total[r]);
}

INLINE void rows_of_panel(const int f, const struct inputs *x, const uint8_t *w, long rows, long k,
                          struct outputs to) {
  float found[MOST_ROWS * PANEL];
  for (long row = 0, count; row < rows; row += count) {
    long left = rows - row < MOST_ROWS ? rows - row : MOST_ROWS;
    const struct inputs *in = x + row * (k / CHUNK);
    count = left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
    if (MOST_ROWS >= 8 && count == 8) product(f, 8, in, w, k, found);
    if (MOST_ROWS >= 4 && count == 4) product(f, 4, in, w, k, found);
    if (MOST_ROWS >= 2 && count == 2) product(f, 2, in, w, k, found);
    if (count == 1) product(f, 1, in, w, k, found);
    write_sums(found, PANEL, row, count, to);
  }
}

void multiply_codes(int format, const struct inputs *x, const uint8_t *w, long rows, long k,
                    struct outputs to) {
  switch (format) {
#define CASE(F) case F: rows_of_panel(F, x, w, rows, k, to); break;
    CASE(Q4_0) CASE(Q4_1) CASE(Q5_0) CASE(Q5_1) CASE(Q8_0) CASE(IQ4_NL)
    CASE(Q4_K) CASE(Q5_K) CASE(Q6_K)
  }
}

/* Of 16 codes, by whole words: their bytes plus 128, in pairs. */
INLINE int32_t sum_codes(const int8_t *codes) {
  const uint64_t each = 0x00ff00ff00ff00ffu;
  uint64_t words[2], pairs = 0;
  __builtin_memcpy(words, codes, sizeof(words));
  for (int i = 0; i < 2; i++) {
    words[i] ^= 0x8080808080808080u;
    pairs += (words[i] & each) + (words[i] >> 8 & each);
  }
  return (int32_t)(pairs * 0x0001000100010001u >> 48) - LANES * 128;
}

/* Codes of a row and their scales, to the nearest; where a number is none or infinite, NaN. */
INLINE void write_codes(const float *x, struct inputs *to, long k) {
  for (long at = 0; at < k; at += CHUNK, to++) {
    vec halves[2] = {load(x + at), load(x + at + LANES)};
    float most = max_bits(larger_bits((ivec)halves[0] & INT32_MAX, (ivec)halves[1] & INT32_MAX));
    float inverse = most > 0 && most <= FLT_MAX ? 127 / most : 0;
    for (int i = 0; i < 2; i++) {
      vec scaled = halves[i] * inverse;
      vec half = (vec)(((ivec)scaled & INT32_MIN) | (ivec)splat(.5f)); /* of its sign */
      ivec codes = __builtin_convertvector(scaled + half, ivec);
      *(signed_sixteen *)(to->codes + LANES * i) = __builtin_convertvector(codes, signed_sixteen);
    }
    to->scale = most <= FLT_MAX ? most / 127 : NAN;
  }
}

/* Sums have a loop of their own: codes that are still in a vector are slow to come out of it. */
void quantise(const float *x, struct inputs *to, long k) {
  write_codes(x, to, k);
  for (long at = 0; at < k; at += CHUNK, to++) {
    int32_t sums[2] = {sum_codes(to->codes), sum_codes(to->codes + LANES)};
    to->minus[0] = -sums[0], to->minus[1] = -sums[1], to->minus[2] = -sums[0] - sums[1];
    to->sum = to->scale * (sums[0] + sums[1]);
  }
}
