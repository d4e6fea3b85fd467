/* The largest number of every row. */
#include "vectors.h"

INLINE int any_lane(ivec flags) {
  int32_t any = 0;
  for (int i = 0; i < LANES; i++) any |= flags[i];
  return any != 0;
}

/* The first place of `value` in a row. */
static long find_first(const float *row, long n, float value) {
  long i = 0;
  for (; i + LANES <= n; i += LANES)
    if (any_lane(load(row + i) == splat(value))) break;
  while (row[i] != value) i++;
  return i;
}

/* Of rows [rows, n], n > 0: where the first of the largest numbers is; that number, then NaN if the
   row has one, else the number again. NaN counts as -inf. */
void find_largest(const float *x, int64_t *places, float *peaks, long rows, long n,
                  int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (rows * n >= MIN_PARALLEL)
  for (long r = 0; r < rows; r++) {
    const float *row = x + r * n;
    vec most = splat(-INFINITY);
    ivec unordered = {0};
    float max = -INFINITY;
    long i = 0;
    int has_nan = 0;
    for (; i + LANES <= n; i += LANES) {
      vec each = load(row + i);
      most = larger(each, most);
      unordered |= each != each;
    }
    for (; i < n; i++) {
      has_nan |= row[i] != row[i];
      if (row[i] > max) max = row[i];
    }
    float lanes = max_lanes(most);
    if (lanes > max) max = lanes;
    has_nan |= any_lane(unordered);
    places[r] = max == -INFINITY ? 0 : find_first(row, n, max);
    peaks[2 * r] = max;
    peaks[2 * r + 1] = has_nan ? NAN : max;
  }
}
