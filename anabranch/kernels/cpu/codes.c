/* Products of inputs in 8 bits with codes, in integers; scales are applied for every chunk.
   Every output is summed in the same order whatever the number of rows. */
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
        sums low = splat_int(-zero * (halves ? in->sums[0] : in->sums[0] + in->sums[1]));
        sums high = splat_int(halves ? -zero * in->sums[1] : 0);
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

/* Codes of one row, rounded to the nearest; a chunk with a NaN or an infinity has a NaN as scale. */
void quantise(const float *x, struct inputs *to, long k) {
  for (long at = 0; at < k; at += CHUNK, to++) {
    vec halves[2] = {load(x + at), load(x + at + LANES)}, largest = {0}, zeros = {0};
    for (int i = 0; i < 2; i++) {
      vec size = choose(halves[i] < 0.f, -halves[i], halves[i]);
      largest = choose(size > largest, size, largest);
      zeros += 0 * halves[i];
    }
    float most = max_lanes(largest), inverse = most > 0 ? 127 / most : 0;
    int sum = 0;
    for (int i = 0; i < 2; i++) {
      vec scaled = halves[i] * inverse;
      ivec codes = __builtin_convertvector(scaled + choose(scaled < 0.f, splat(-.5f), splat(.5f)), ivec);
      *(signed_sixteen *)(to->codes + LANES * i) = __builtin_convertvector(codes, signed_sixteen);
      to->sums[i] = (int32_t)sum_lanes(to_floats(codes));
      sum += to->sums[i];
    }
    to->scale = most / 127 + sum_lanes(zeros);
    to->sum = to->scale * sum;
  }
}
