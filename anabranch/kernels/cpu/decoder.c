/* A decoder layer before and after its attention, each in one call: for few rows, what a call
   costs on the host is more than what it computes. */
#include "kernels.h"
#include "vectors.h"

/* Rotate heads in place: halves of a head are the two coordinates. cos and sin are [rows, dim]. */
static void rotate(float *x, const float *cos, const float *sin, long rows, long row_stride,
                   long num_heads, long dim, int num_threads) {
  long half = dim / 2;
#pragma omp parallel for num_threads(num_threads) if (rows * num_heads * dim >= MIN_PARALLEL)
  for (long row = 0; row < rows; row++)
    for (long head = 0; head < num_heads; head++) {
      float *low = x + row * row_stride + head * dim, *high = low + half;
      const float *c = cos + row * dim, *s = sin + row * dim;
      for (long i = 0; i < half; i++) {
        float a = low[i], b = high[i];
        low[i] = a * c[i] - b * s[i];
        high[i] = b * c[i + half] + a * s[i + half];
      }
    }
}

/* joined [rows, n] = norm(x) @ w.T + bias, of which the first heads are rotated. */
void layer_inputs(const float *x, const float *norm, const struct matrix *w, const float *bias,
                  const float *cos, const float *sin, float *normed, float *joined, long rows,
                  long num_rotated, long dim, float epsilon, int num_threads) {
  rms_norm(x, norm, normed, rows, w->k, epsilon, num_threads);
  packed_linear(w, normed, bias, 0, joined, rows, num_threads);
  rotate(joined, cos, sin, rows, w->n, num_rotated, dim, num_threads);
}

/* middle = x + attended @ o.T + bias; y = middle + gated(norm(middle) @ gate_up.T) @ down.T.
   room holds rows * (2 * hidden + 3 * inner) numbers. */
void layer_outputs(const float *x, const float *attended, const struct matrix *o,
                   const float *o_bias, const float *norm, const struct matrix *gate_up,
                   const struct matrix *down, float *room, float *y, long rows, float epsilon,
                   int num_threads) {
  long hidden = o->n, inner = down->k;
  float *middle = room, *normed = middle + rows * hidden, *joined = normed + rows * hidden;
  float *gated = joined + rows * 2 * inner;
  packed_linear(o, attended, o_bias, x, middle, rows, num_threads);
  rms_norm(middle, norm, normed, rows, hidden, epsilon, num_threads);
  packed_linear(gate_up, normed, 0, 0, joined, rows, num_threads);
  silu_gate(joined, gated, rows, inner, num_threads);
  packed_linear(down, gated, 0, middle, y, rows, num_threads);
}
