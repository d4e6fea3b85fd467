/* y = x @ w.T + bias + residual over weights in panels; those of floats are multiplied here.
   A panel is read once, front to back, for up to 12 rows at a time. Every output is summed in the
   same order whatever the number of rows, so a row has the same bits in any batch. */
#include <stdlib.h>

#include "kernels.h"
#include "vectors.h"

#define ROWS 12        /* 24 vectors of sums and 2 of weights fit into 32 registers */
#define STREAMS 4      /* panels that one row reads at a time: more reads under way */
#define CHUNK_K 32     /* terms of a sum before it is added to the total: half the error */
#define AHEAD 2048     /* floats: with many rows a core gets to the next reads too late by itself */
#define MIN_SHARED_ROWS 16 /* from which threads quantise inputs together */
#define UNROLLED(i, count) _Pragma("GCC unroll 12") for (int i = 0; i < count; i++)

/* Rows [num_rows, k] times panels that lie `k * FLOAT_PANEL` apart, into tiles [num_rows, FLOAT_PANEL]. */
INLINE void product(const int num_rows, const int num_panels, const float *restrict x,
                    const float *restrict w, long k, float *restrict tiles) {
  vec total[ROWS][2 * STREAMS] = {0};
  for (long start = 0; start < k; start += CHUNK_K) {
    long stop = start + CHUNK_K < k ? start + CHUNK_K : k;
    vec sum[ROWS][2 * STREAMS] = {0};
    for (long i = start; i < stop; i++)
      UNROLLED(p, num_panels) {
        const float *from = w + (p * k + i) * FLOAT_PANEL;
        if (num_rows > 2) __builtin_prefetch(from + AHEAD), __builtin_prefetch(from + AHEAD + LANES);
        vec low = load(from), high = load(from + LANES);
        UNROLLED(r, num_rows) {
          sum[r][2 * p] += x[r * k + i] * low;
          sum[r][2 * p + 1] += x[r * k + i] * high;
        }
      }
    UNROLLED(r, num_rows) UNROLLED(j, 2 * num_panels) total[r][j] += sum[r][j];
  }
  UNROLLED(p, num_panels) UNROLLED(r, num_rows) {
    store(tiles + (p * num_rows + r) * FLOAT_PANEL, total[r][2 * p]);
    store(tiles + (p * num_rows + r) * FLOAT_PANEL + LANES, total[r][2 * p + 1]);
  }
}

static void few_rows(int num_rows, const float *x, const float *w, long k, float *tiles) {
  switch (num_rows) {
#define CASE(R) case R: product(R, 1, x, w, k, tiles); break;
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
    CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
  }
}

struct call {
  const float *x, *bias, *residual;
  const struct inputs *inputs; /* of all rows, or null where they stay floats */
  float *y;
  long n, k;
};

static struct outputs place(const struct call *call, long row, long column, long width) {
  long at = row * call->n + column;
  return (struct outputs){call->y + at, call->bias ? call->bias + column : 0,
                          call->residual ? call->residual + at : 0, call->n, width};
}

/* Panels of floats from `panel` to `stop`, whose first output is `column` plus its number * 32. */
static void multiply_floats(const struct call *call, const struct part *part, long column,
                            long row, long rows, long panel, long stop) {
  float tiles[ROWS * FLOAT_PANEL];
  const float *x = call->x + row * call->k, *w = (const float *)part->data;
  long size = FLOAT_PANEL * call->k, k = call->k;
#define WIDTH(p) (part->n - (p)*FLOAT_PANEL < FLOAT_PANEL ? part->n - (p)*FLOAT_PANEL : FLOAT_PANEL)
  if (rows == 1)
    for (; panel + STREAMS <= stop; panel += STREAMS) {
      product(1, STREAMS, x, w + panel * size, k, tiles);
      for (long p = panel; p < panel + STREAMS; p++)
        write_sums(tiles + (p - panel) * FLOAT_PANEL, FLOAT_PANEL, 0, 1,
                   place(call, row, column + p * FLOAT_PANEL, WIDTH(p)));
    }
  for (; panel < stop; panel++)
    for (long r = 0; r < rows; r += ROWS) {
      int count = rows - r < ROWS ? (int)(rows - r) : ROWS;
      few_rows(count, x + r * k, w + panel * size, k, tiles);
      write_sums(tiles, FLOAT_PANEL, r, count,
                 place(call, row, column + panel * FLOAT_PANEL, WIDTH(panel)));
    }
}

/* One thread's panels of a part, whose first output is `column`. */
static void multiply_part(const struct call *call, const struct part *part, long column, long row,
                          long rows, int share, int num_shares) {
  long width = part->format == F32 ? FLOAT_PANEL : PANEL, panels = (part->n + width - 1) / width;
  long panel = panels * share / num_shares, stop = panels * (share + 1) / num_shares;
  if (part->format == F32) {
    multiply_floats(call, part, column, row, rows, panel, stop);
    return;
  }
  int format = (int)part->format;
  long size = call->k / tile_span(format) * tile_bytes(format), left;
  for (; panel < stop; panel++) {
    left = part->n - panel * PANEL;
    struct outputs to = place(call, row, column + panel * PANEL, left < PANEL ? left : PANEL);
    const uint8_t *w = part->data + panel * size;
    if (call->inputs && format >= Q4_0)
      multiply_codes(format, call->inputs + row * (call->k / CHUNK), w, rows, call->k, to);
    else
      multiply_expanded(format, call->x + row * call->k, w, rows, call->k, to);
  }
}

/* Room for the inputs in 8 bits, or null: then, and where memory is short, they stay floats. */
static struct inputs *room_for_inputs(const struct matrix *w, long rows) {
  int has_codes = 0;
  for (long p = 0; p < w->num_parts; p++) has_codes |= w->parts[p].format >= Q4_0;
  if (!has_codes || w->has_float_inputs) return 0;
  return malloc(rows * (w->k / CHUNK) * sizeof(struct inputs));
}

void packed_linear(const struct matrix *w, const float *x, const float *bias,
                   const float *residual, float *y, long rows, int num_threads) {
  struct inputs *inputs = room_for_inputs(w, rows);
  struct call call = {x, bias, residual, inputs, y, w->n, w->k};
  long chunks = w->k / CHUNK, few = inputs && rows < MIN_SHARED_ROWS ? rows : 0;
  for (long row = 0; row < few; row++) quantise(x + row * w->k, inputs + row * chunks, w->k);
#pragma omp parallel num_threads(num_threads)
  {
    if (inputs && !few) {
#pragma omp for
      for (long row = 0; row < rows; row++) quantise(x + row * w->k, inputs + row * chunks, w->k);
    }
#pragma omp for nowait
    for (int share = 0; share < num_threads; share++)
      for (long row = 0; row < rows; row += CHUNK_ROWS) {
        long count = rows - row < CHUNK_ROWS ? rows - row : CHUNK_ROWS, column = 0;
        for (long p = 0; p < w->num_parts; column += w->parts[p].n, p++)
          multiply_part(&call, w->parts + p, column, row, count, share, num_threads);
      }
  }
  free(inputs);
}

/* Rows `ids` of the weights, as floats [num_rows, k]; 0, or 1 + the place of an id out of range. */
long packed_rows(const struct matrix *w, const int64_t *ids, float *to, long num_rows,
                 int num_threads) {
  for (long row = 0; row < num_rows; row++)
    if (ids[row] < 0 || ids[row] >= w->n) return row + 1;
#pragma omp parallel for num_threads(num_threads) if (num_rows * w->k >= MIN_PARALLEL)
  for (long row = 0; row < num_rows; row++) {
    const struct part *part = w->parts;
    long id = ids[row], k = w->k;
    for (; id >= part->n; part++) id -= part->n;
    float *out = to + row * k, tile[MAX_SPAN * PANEL];
    if (part->format == F32) {
      const float *from = (const float *)part->data + id / FLOAT_PANEL * FLOAT_PANEL * k;
      for (long i = 0; i < k; i++) out[i] = from[i * FLOAT_PANEL + id % FLOAT_PANEL];
      continue;
    }
    int format = (int)part->format;
    long span = tile_span(format), size = tile_bytes(format);
    const uint8_t *from = part->data + id / PANEL * (k / span) * size;
    for (long at = 0; at < k; at += span, from += size) {
      expand_tile(format, from, tile);
      for (long i = 0; i < span; i++) out[at + i] = tile[i * PANEL + id % PANEL];
    }
  }
  return 0;
}
