/* Kernels that others call. */
void packed_linear(const float *x, const float *w, const float *bias, const float *residual,
                   float *y, long rows, long n, long k, int num_threads);
void rms_norm(const float *x, const float *weight, float *y, long rows, long n, float epsilon,
              int num_threads);
void silu_gate(const float *joined, float *y, long rows, long n, int num_threads);
