/* Kernels that others call. */
#include "matrix.h"

void packed_linear(const struct matrix *w, const float *x, const float *bias,
                   const float *residual, float *y, long rows, int num_threads);
void rms_norm(const float *x, const float *weight, float *y, long rows, long n, float epsilon,
              int num_threads);
void silu_gate(const float *joined, float *y, long rows, long n, int num_threads);
