/* A decoder layer before and after its attention, each in one call, and all layers of a model over
   a paged cache in one, for few rows and for a chunk of a prompt: with few, a call costs more on
   the host than what it computes. */
#include <string.h>

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

/* Normalise heads in place, each by its row of norms [num_heads, dim]. */
static void norm_heads(float *x, const float *norms, long rows, long row_stride, long num_heads,
                       long dim, float epsilon, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (rows * num_heads * dim >= MIN_PARALLEL)
  for (long row = 0; row < rows; row++)
    for (long head = 0; head < num_heads; head++) {
      float *each = x + row * row_stride + head * dim;
      rms_norm(each, norms + head * dim, each, 1, dim, epsilon, 1);
    }
}

/* joined [rows, n] = norm(x) @ w.T + bias, of which the first heads are normalised, unless
   head_norms is 0, and rotated. */
void layer_inputs(const float *x, const float *norm, const struct matrix *w, const float *bias,
                  const float *head_norms, const float *cos, const float *sin, float *normed,
                  float *joined, long rows, long num_rotated, long dim, float epsilon,
                  int num_threads) {
  rms_norm(x, norm, normed, rows, w->k, epsilon, num_threads);
  packed_linear(w, normed, bias, 0, joined, rows, num_threads);
  if (head_norms)
    norm_heads(joined, head_norms, rows, w->n, num_rotated, dim, epsilon, num_threads);
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

/* A layer as `run_layers` finds it in a table of int64. */
struct layer {
  const struct matrix *qkv, *o, *gate_up, *down;
  const float *qkv_bias, *head_norms, *o_bias, *norm, *next_norm;
  float *k, *v; /* caches, whose strides are those of `sizes` */
  int64_t window;
};

/* What is the same for all layers and changes with every step. */
struct step {
  const float *cos, *sin;
  const int32_t *pages, *seq_lens, *starts;
  const int64_t *slots, *sizes; /* of attend_pages */
};

/* All layers over hidden [rows, hidden], in place. `factors` are for every layer the epsilons of
   both norms and the scale of its attention; room holds rows * (4 * hidden + width of joined
   projections + 3 * inner) numbers and num_splits * rows * heads * (dim + 1). Returns what
   attend_pages does. */
long run_layers(const struct layer *layers, const float *factors, const struct step *step,
                float *hidden, float *room, long num_layers, long rows, long num_rotated,
                long dim, int num_threads) {
  int64_t sizes[NUM_SIZES];
  memcpy(sizes, step->sizes, sizeof(sizes));
  long num_kv_heads = sizes[KV_HEADS], heads = num_kv_heads * sizes[GROUP], status = 0;
  long num_splits = sizes[SPLITS], size = layers->o->n, n = layers->qkv->n;
  float *normed = room, *next = normed + rows * size, *joined = next + rows * size;
  float *out = joined + rows * n, *lse = out + num_splits * rows * heads * dim;
  float *rest = lse + num_splits * rows * heads, *from = hidden;
  for (float *each = out; each < rest; each++) /* of tokens of no sequence, written by nobody */
    *each = each < lse ? 0 : -INFINITY;
  for (long i = 0; i < num_layers && !status; i++, layers++, factors += 3) {
    layer_inputs(from, layers->norm, layers->qkv, layers->qkv_bias, layers->head_norms, step->cos,
                 step->sin, normed, joined, rows, num_rotated, dim, factors[0], num_threads);
    sizes[WINDOW] = layers->window;
    status = attend_pages(joined, layers->k, layers->v, 0, 0, 0, step->pages, step->seq_lens,
                          step->starts, joined + heads * dim,
                          joined + (heads + num_kv_heads) * dim, step->slots, out, lse, sizes,
                          factors[2], num_threads);
    merge_splits(out, lse, num_splits, rows * heads, dim);
    layer_outputs(from, out, layers->o, layers->o_bias, layers->next_norm, layers->gate_up,
                  layers->down, rest, next, rows, factors[1], num_threads);
    float *spent = from;
    from = next, next = spent;
  }
  if (from != hidden) memcpy(hidden, from, rows * size * sizeof(float));
  return status;
}
