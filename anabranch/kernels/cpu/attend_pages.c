/* Attention over a paged cache: new keys are kept, sequences shared among threads. */
#include <string.h>

#include "pages.h"

#define MIN_SPLIT_KEYS 256 /* of one sequence; fewer are not worth a merge */
#define TASKS_PER_THREAD 4

/* States of the same rows over parts of their keys, out [splits, rows, dim] and lse [splits, rows],
   merged into the first. */
void merge_splits(float *out, const float *lse, long num_splits, long rows, long dim) {
  for (long row = 0; num_splits > 1 && row < rows; row++) {
    float max = -INFINITY, sum = 0;
    for (long s = 0; s < num_splits; s++)
      if (lse[s * rows + row] > max) max = lse[s * rows + row];
    if (max == -INFINITY) continue; /* no keys: all parts are 0 */
    for (long s = 0; s < num_splits; s++) sum += expf(lse[s * rows + row] - max);
    for (long s = 0; s < num_splits; s++) {
      float weight = expf(lse[s * rows + row] - max) / sum, *first = out + row * dim;
      const float *part = out + (s * rows + row) * dim;
      for (long i = 0; i < dim; i++) first[i] = part[i] * weight + (s ? first[i] : 0);
    }
  }
}

/* 0, or 1 + a token whose slot is outside of the cache; negative slots are allowed. */
static long find_outside(const int64_t *slots, long num_tokens, long num_slots) {
  for (long token = 0; token < num_tokens; token++)
    if (slots[token] >= num_slots) return token + 1;
  return 0;
}

/* New rows of every token into a cache [num_pages, page_size, heads, dim]; negative slots are
   skipped. */
static void append(const float *rows, long token_stride, long head_stride, void *cache,
                   const struct cache *strides, const int64_t *slots, long num_tokens,
                   long num_heads, long dim, long page_size, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_tokens * num_heads * dim >= MIN_PARALLEL)
  for (long token = 0; token < num_tokens; token++) {
    long slot = slots[token];
    if (slot < 0) continue;
    float *to = (float *)cache + slot / page_size * strides->page + slot % page_size * strides->row;
    for (long head = 0; head < num_heads; head++)
      memcpy(to + head * strides->head, rows + token * token_stride + head * head_stride,
             dim * sizeof(float));
  }
}

/* Whether the tokens of a sequence are among the queries, and its keys in the storage. */
static int is_valid(const struct call *call, long seq) {
  long start = call->starts[seq], stop = call->starts[seq + 1], size = call->page_size;
  if (start < 0 || stop < start || stop > call->num_tokens) return 0;
  long seq_len = call->seq_lens[seq], count = (seq_len + size - 1) / size;
  if (count > call->page_columns) return 0;
  const int32_t *pages = call->pages + seq * call->page_stride;
  for (long i = 0; i < count; i++) {
    long used = least(seq_len - i * size, size);
    if (pages[i] < 0 || pages[i] * call->page_step + used > call->num_rows) return 0;
  }
  return 1;
}

INLINE struct cache make_cache(const void *data, const void *scales, const int64_t *strides,
                               const int64_t *format) {
  return (struct cache){data, strides[0], strides[1], strides[2], format[0], format[1], format[2],
                        scales, format[3], format[4], format[5], format[6]};
}

/* Into how many parts to cut the keys of sequences with few queries, so that all threads have
   work: a part is worth its merge, and tiles of other sequences are work, too. */
long select_splits(const int32_t *seq_lens, const int32_t *starts, long num_seqs,
                   long num_kv_heads, long group, int num_threads) {
  struct call call = {.starts = starts, .group = group};
  long longest = 0, num_tasks = 0;
  for (long seq = 0; seq < num_seqs; seq++) {
    int few = has_few(&call, seq);
    num_tasks += num_kv_heads * (few ? 1 : num_tiles(&call, seq));
    longest = most(longest, few ? seq_lens[seq] : 0);
  }
  long wanted = TASKS_PER_THREAD * num_threads / most(num_tasks, 1);
  return most(least(wanted, longest / MIN_SPLIT_KEYS), 1);
}

/* Keep new keys where `slots` is given, which needs caches of floats, then attend. Returns 0, or
   1 + a sequence whose tokens, length or pages are not valid, or -1 - a token whose slot is not. */
long attend_pages(const float *q, void *k, void *v, const void *k_scales, const void *v_scales,
                  const float *levels, const int32_t *pages, const int32_t *seq_lens,
                  const int32_t *starts, const float *new_k, const float *new_v,
                  const int64_t *slots, float *out, float *lse, const int64_t *sizes, float scale,
                  int num_threads) {
  const int64_t *s = sizes;
  struct call call = {.q = q, .q_token = s[0], .q_head = s[1],
                      .k = make_cache(k, k_scales, s + 2, s + 26),
                      .v = make_cache(v, v_scales, s + 5, s + 33), .levels = levels,
                      .pages = pages, .seq_lens = seq_lens,
                      .starts = starts, .out = out, .lse = lse, .num_tokens = s[9],
                      .num_kv_heads = s[10], .group = s[11], .dim_k = s[12], .dim_v = s[13],
                      .num_rows = s[14], .page_columns = s[15], .page_stride = s[16],
                      .page_size = s[17], .page_step = s[18], .num_splits = s[19],
                      .window = s[20], .causal = (int)s[21], .scale = scale};
  long num_seqs = s[8], most_tasks = call.num_splits;
  for (long seq = 0; seq < num_seqs; seq++) {
    if (!is_valid(&call, seq)) return seq + 1;
    most_tasks = most(most_tasks, has_few(&call, seq) ? 0 : num_tiles(&call, seq));
  }
  if (slots) {
    long bad = find_outside(slots, s[9], s[14]);
    if (bad) return -bad;
    append(new_k, s[22], s[23], k, &call.k, slots, s[9], s[10], s[12], s[17], num_threads);
    append(new_v, s[24], s[25], v, &call.v, slots, s[9], s[10], s[13], s[17], num_threads);
  }
#pragma omp parallel for collapse(3) schedule(dynamic) num_threads(num_threads)
  for (long task = most_tasks - 1; task >= 0; task--) /* later tiles see more keys */
    for (long seq = 0; seq < num_seqs; seq++)
      for (long head = 0; head < call.num_kv_heads; head++)
        if (has_few(&call, seq)) {
          if (task < call.num_splits) attend_few(&call, seq, head, task);
        } else if (task < num_tiles(&call, seq)) {
          attend_many(&call, seq, head, task);
        }
  return 0;
}
