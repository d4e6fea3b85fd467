/* What happens to rows between products: normalising them and gating them. */
#include "kernels.h"
#include "vectors.h"

void rms_norm(const float *x, const float *weight, float *y, long rows, long n, float epsilon,
              int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (rows * n >= MIN_PARALLEL)
  for (long row = 0; row < rows; row++) {
    const float *from = x + row * n;
    float *to = y + row * n;
    vec squares = {0};
    long i = 0;
    for (; i + LANES <= n; i += LANES) squares += load(from + i) * load(from + i);
    float sum = sum_lanes(squares);
    for (long j = i; j < n; j++) sum += from[j] * from[j];
    float scale = 1 / sqrtf(sum / n + epsilon);
    for (i = 0; i + LANES <= n; i += LANES) store(to + i, load(weight + i) * (load(from + i) * scale));
    for (; i < n; i++) to[i] = weight[i] * (from[i] * scale);
  }
}

INLINE vec gated(vec gate, vec up) { return gate / (1 + exp_lanes(-gate)) * up; }

/* silu(gate) * up, where a row of `joined` is gate before up, n each */
void silu_gate(const float *joined, float *y, long rows, long n, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (rows * n >= MIN_PARALLEL)
  for (long row = 0; row < rows; row++) {
    const float *gate = joined + row * 2 * n, *up = gate + n;
    float *to = y + row * n;
    long i = 0;
    for (; i + LANES <= n; i += LANES) store(to + i, gated(load(gate + i), load(up + i)));
    for (; i < n; i++) to[i] = gated(splat(gate[i]), splat(up[i]))[0];
  }
}
