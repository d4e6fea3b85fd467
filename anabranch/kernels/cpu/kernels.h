/* Kernels that others call. */
#include "matrix.h"

void packed_linear(const struct matrix *w, const float *x, const float *bias,
                   const float *residual, float *y, long rows, int num_threads);
void rms_norm(const float *x, const float *weight, float *y, long rows, long n, float epsilon,
              int num_threads);
void silu_gate(const float *joined, float *y, long rows, long n, int num_threads);

/* Places in the sizes of attend_pages. */
enum { KV_HEADS = 10, GROUP = 11, SPLITS = 19, WINDOW = 20, NUM_SIZES = 40 };
long attend_pages(const float *q, void *k, void *v, const void *k_scales, const void *v_scales,
                  const float *levels, const int32_t *pages, const int32_t *seq_lens,
                  const int32_t *starts, const float *new_k, const float *new_v,
                  const int64_t *slots, float *out, float *lse, const int64_t *sizes, float scale,
                  int num_threads);
void merge_splits(float *out, const float *lse, long num_splits, long rows, long dim);
