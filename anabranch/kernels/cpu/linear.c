/* y = x @ w.T + bias + residual over weights in panels of 32 outputs, [panels, k, 32].
   A panel is read once, front to back, for up to 12 rows at a time. Every output is summed in the
   same order whatever the number of rows, so a row has the same bits in any batch. */
#include "kernels.h"
#include "vectors.h"

#define PANEL (2 * LANES)
#define ROWS 12        /* 24 vectors of sums and 2 of weights fit into 32 registers */
#define STREAMS 4      /* panels that one row reads at a time: more reads under way */
#define CHUNK_ROWS 192 /* whose inputs stay in the L2 cache while panels pass by */
#define CHUNK_K 32     /* terms of a sum before it is added to the total: half the error */
#define UNROLLED(i, count) _Pragma("GCC unroll 12") for (int i = 0; i < count; i++)

/* Rows [num_rows, k] times panels that lie `k * PANEL` apart, into tiles [num_rows, PANEL]. */
INLINE void product(const int num_rows, const int num_panels, const float *restrict x,
                    const float *restrict w, long k, float *restrict tiles) {
  vec total[ROWS][2 * STREAMS] = {0};
  for (long start = 0; start < k; start += CHUNK_K) {
    long stop = start + CHUNK_K < k ? start + CHUNK_K : k;
    vec sum[ROWS][2 * STREAMS] = {0};
    for (long i = start; i < stop; i++)
      UNROLLED(p, num_panels) {
        vec low = load(w + (p * k + i) * PANEL), high = load(w + (p * k + i) * PANEL + LANES);
        UNROLLED(r, num_rows) {
          sum[r][2 * p] += x[r * k + i] * low;
          sum[r][2 * p + 1] += x[r * k + i] * high;
        }
      }
    UNROLLED(r, num_rows) UNROLLED(j, 2 * num_panels) total[r][j] += sum[r][j];
  }
  UNROLLED(p, num_panels) UNROLLED(r, num_rows) {
    store(tiles + (p * num_rows + r) * PANEL, total[r][2 * p]);
    store(tiles + (p * num_rows + r) * PANEL + LANES, total[r][2 * p + 1]);
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
  const float *x, *w, *bias, *residual;
  float *y;
  long n, k;
};

/* Sums of one panel as outputs of rows from `row` on. */
static void write_tile(const struct call *call, const float *tile, long row, long count,
                       long panel) {
  long first = panel * PANEL, width = call->n - first < PANEL ? call->n - first : PANEL;
  for (long r = 0; r < count; r++)
    for (long i = 0; i < width; i++) {
      long at = (row + r) * call->n + first + i;
      float y = tile[r * PANEL + i] + (call->bias ? call->bias[first + i] : 0);
      call->y[at] = y + (call->residual ? call->residual[at] : 0);
    }
}

static void multiply_panels(const struct call *call, long row, long rows, long panel, long stop) {
  float tiles[ROWS * PANEL];
  const float *x = call->x + row * call->k;
  if (rows == 1)
    for (; panel + STREAMS <= stop; panel += STREAMS) {
      product(1, STREAMS, x, call->w + panel * PANEL * call->k, call->k, tiles);
      for (int p = 0; p < STREAMS; p++) write_tile(call, tiles + p * PANEL, row, 1, panel + p);
    }
  for (; panel < stop; panel++)
    for (long r = 0; r < rows; r += ROWS) {
      int count = rows - r < ROWS ? (int)(rows - r) : ROWS;
      few_rows(count, x + r * call->k, call->w + panel * PANEL * call->k, call->k, tiles);
      write_tile(call, tiles, row + r, count, panel);
    }
}

void packed_linear(const float *x, const float *w, const float *bias, const float *residual,
                   float *y, long rows, long n, long k, int num_threads) {
  struct call call = {x, w, bias, residual, y, n, k};
  long panels = (n + PANEL - 1) / PANEL;
#pragma omp parallel for num_threads(num_threads)
  for (int share = 0; share < num_threads; share++)
    for (long row = 0; row < rows; row += CHUNK_ROWS) {
      long count = rows - row < CHUNK_ROWS ? rows - row : CHUNK_ROWS;
      long first = panels * share / num_threads, stop = panels * (share + 1) / num_threads;
      multiply_panels(&call, row, count, first, stop);
    }
}
