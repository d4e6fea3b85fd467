/* Products of floats with codes that are expanded a tile at a time, and weights as floats. */
#include "chunks.h"

#define ROWS 8
#define UNROLLED(i, count) _Pragma("GCC unroll 8") for (int i = 0; i < count; i++)

INLINE void expand(const int f, const uint8_t *tile, float *to) {
  if (f == F16 || f == BF16) {
    for (int column = 0; column < CHUNK; column++, tile += 32)
      store(to + column * PANEL, f == F16 ? from_halves(tile) : from_bfloats(tile));
    return;
  }
  struct head head = read_head(f, tile);
  for (int i = 0; i < span_of(f) / CHUNK; i++) {
    struct chunk chunk;
    read_chunk(f, tile, head, i, &chunk);
    for (int v = 0; v < 8; v++) {
      uvec fours;
      __builtin_memcpy(&fours, &chunk.codes[v], sizeof(fours));
      for (int column = 0; column < 4; column++) {
        vec code = to_floats((ivec)(fours >> 8 * column & 255) - zero_code(f));
        store(to + ((i * 8 + v) * 4 + column) * PANEL, chunk.scale[v / 4] * code + chunk.min);
      }
    }
  }
}

void expand_tile(int format, const uint8_t *tile, float *to) {
  switch (format) {
#define CASE(F) case F: expand(F, tile, to); break;
    CASE(F16) CASE(BF16) CASE(Q4_0) CASE(Q4_1) CASE(Q5_0) CASE(Q5_1) CASE(Q8_0) CASE(IQ4_NL)
    CASE(Q4_K) CASE(Q5_K) CASE(Q6_K)
  }
}

long tile_span(int format) { return span_of(format); }

long tile_bytes(int format) {
  if (format == F16 || format == BF16) return CHUNK * PANEL * 2;
  return head_bytes(format) + span_of(format) / CHUNK * chunk_bytes(format);
}

/* Add the products of a tile, [span, 16], to the sums of some rows, [rows, 16]; a chunk at a time,
   which halves the error. */
INLINE void add_products(const int num_rows, const float *x, const float *tile, long span, long k,
                         float *sums) {
  for (long start = 0; start < span; start += CHUNK) {
    vec part[ROWS] = {0};
    for (long i = start; i < start + CHUNK; i++) {
      vec weights = load(tile + i * PANEL);
      UNROLLED(r, num_rows) part[r] += x[r * k + i] * weights;
    }
    UNROLLED(r, num_rows) store(sums + r * PANEL, load(sums + r * PANEL) + part[r]);
  }
}

void multiply_expanded(int format, const float *x, const uint8_t *w, long rows, long k,
                       struct outputs to) {
  float tile[MAX_SPAN * PANEL], sums[CHUNK_ROWS * PANEL] = {0};
  long span = tile_span(format);
  for (long at = 0; at < k; at += span, w += tile_bytes(format)) {
    expand_tile(format, w, tile);
    long row = 0;
    for (; row + ROWS <= rows; row += ROWS)
      add_products(ROWS, x + row * k + at, tile, span, k, sums + row * PANEL);
    for (; row < rows; row++) add_products(1, x + row * k + at, tile, span, k, sums + row * PANEL);
  }
  write_sums(sums, PANEL, 0, rows, to);
}
