/* Attention of few queries in float32 over a paged cache: floats are read where they lie, codes of
   a quantised cache are decoded a block at a time.
   A task is a sequence, a kv head and a part of the keys; it makes the states of all rows that
   read the head: queries of the sequence times heads of the group. */
#include "kernels.h"
#include "vectors.h"

#define BLOCK 64    /* keys at a time: they stay in the L1 cache for all rows */
#define MAX_ROWS 64 /* of a task */
#define MAX_DIM 256 /* of a head, a multiple of 16 */

enum { FLOATS, INT8, E4M3 }; /* what a cache holds */

struct cache {
  const void *data;
  long page, row, head; /* strides */
  long format, has_half_scales, block; /* elements of a block share a scale */
  const void *scales;
  long scale_page, scale_row, scale_head, scale_block; /* strides */
};

struct call {
  const float *q;
  long q_token, q_head; /* strides */
  struct cache k, v;
  const int32_t *pages, *seq_lens, *starts; /* [seqs, page_columns], [seqs], [seqs + 1] */
  float *out, *lse;                         /* [splits, tokens, heads, dim_v] and without dim_v */
  long num_tokens, num_kv_heads, group, dim_k, dim_v, num_pages, page_columns, page_size;
  long page_stride, num_splits, window;
  int causal;
  float scale;
  const float *levels; /* [256], numbers of the codes of E4M3 */
};

struct states {
  float max[MAX_ROWS], sum[MAX_ROWS], out[MAX_ROWS][MAX_DIM];
};

INLINE long least(long a, long b) { return a < b ? a : b; }
INLINE long most(long a, long b) { return a > b ? a : b; }

/* Whether all pages of a sequence are in the cache. */
static int is_valid(const struct call *call, long seq) {
  long count = (call->seq_lens[seq] + call->page_size - 1) / call->page_size;
  if (count > call->page_columns) return 0;
  const int32_t *pages = call->pages + seq * call->page_stride;
  for (long i = 0; i < count; i++)
    if (pages[i] < 0 || pages[i] >= call->num_pages) return 0;
  return 1;
}

/* Of a scale, which is finite and not negative. */
INLINE float from_half(uint16_t half) {
  union { uint32_t bits; float value; } normal = {((uint32_t)half << 13) + (112u << 23)};
  return half & 0x7c00 ? normal.value : half * 0x1p-24f;
}

/* Codes with one scale, a multiple of 16 of them. */
INLINE void decode(const uint8_t *codes, long count, long format, float scale, const float *levels,
                   float *restrict to) {
  if (format == INT8)
    for (long i = 0; i < count; i += LANES)
      for (long j = i; j < i + LANES; j++) to[j] = (float)(int8_t)codes[j] * scale;
  else
    for (long i = 0; i < count; i++) to[i] = levels[codes[i]] * scale;
}

/* A row of a cache: where it lies, or decoded into `to`. */
INLINE const float *read_row(const struct cache *cache, const struct call *call, long seq, long key,
                             long head, long dim, float *to) {
  long page = call->pages[seq * call->page_stride + key / call->page_size];
  long row = key % call->page_size;
  long place = page * cache->page + row * cache->row + head * cache->head;
  if (cache->format == FLOATS) return (const float *)cache->data + place;
  const uint8_t *codes = (const uint8_t *)cache->data + place;
  long at = page * cache->scale_page + row * cache->scale_row + head * cache->scale_head;
  for (long i = 0; i < dim; i += cache->block, at += cache->scale_block) {
    float scale = cache->has_half_scales ? from_half(((const uint16_t *)cache->scales)[at])
                                         : ((const float *)cache->scales)[at];
    decode(codes + i, cache->block, cache->format, scale, call->levels, to + i);
  }
  return to;
}

INLINE float dot(const float *a, const float *b, long dim) {
  vec sum = {0};
  for (long i = 0; i < dim; i += LANES) sum += load(a + i) * load(b + i);
  return sum_lanes(sum);
}

/* Take keys into the state of a row. Scores become weights, with room for 16 at a time. */
static void take_in(struct states *states, long row, float *scores, const float *const *values,
                    long count, long dim) {
  vec peaks = splat(states->max[row]), sums = {0};
  float *out = states->out[row];
  for (long j = count; j % LANES; j++) scores[j] = -INFINITY;
  for (long j = 0; j < count; j += LANES)
    peaks = choose(load(scores + j) > peaks, load(scores + j), peaks);
  float max = max_lanes(peaks);
  for (long j = 0; j < count; j += LANES) {
    vec weights = exp_lanes(load(scores + j) - max);
    store(scores + j, weights);
    sums += weights;
  }
  float sum = sum_lanes(sums);
  float old = states->sum[row] > 0 ? expf(states->max[row] - max) : 0;
  states->max[row] = max;
  states->sum[row] = states->sum[row] * old + sum;
  for (long i = 0; i < dim; i += LANES) {
    vec part[2] = {load(out + i) * old, {0}}; /* two sums: additions overlap */
    for (long j = 0; j + 1 < count; j += 2) {
      part[0] += scores[j] * load(values[j] + i);
      part[1] += scores[j + 1] * load(values[j + 1] + i);
    }
    if (count % 2) part[0] += scores[count - 1] * load(values[count - 1] + i);
    store(out + i, part[0] + part[1]);
  }
}

/* Take keys [first, stop) of a sequence, at most a block, into the states of all rows. */
static void attend_block(const struct call *call, struct states *states, long seq, long head,
                         long first, long stop) {
  long q_start = call->starts[seq], q_len = call->starts[seq + 1] - q_start;
  const float *keys[BLOCK], *values[BLOCK];
  float scores[BLOCK] = {0}, decoded[2][BLOCK][MAX_DIM];
  for (long key = first; key < stop; key++) {
    long j = key - first;
    keys[j] = read_row(&call->k, call, seq, key, head, call->dim_k, decoded[0][j]);
    values[j] = read_row(&call->v, call, seq, key, head, call->dim_v, decoded[1][j]);
  }
  for (long row = 0; row < q_len * call->group; row++) {
    long token = row / call->group, position = call->seq_lens[seq] - q_len + token;
    long from = most(position - call->window + 1, first);
    long to = call->causal ? least(position + 1, stop) : stop;
    if (from >= to) continue;
    const float *query = call->q + (q_start + token) * call->q_token +
                         (head * call->group + row % call->group) * call->q_head;
    for (long key = from; key < to; key++)
      scores[key - from] = call->scale * dot(query, keys[key - first], call->dim_k);
    take_in(states, row, scores, values + (from - first), to - from, call->dim_v);
  }
}

static void attend_task(const struct call *call, long seq, long head, long split) {
  struct states states;
  long q_start = call->starts[seq], q_len = call->starts[seq + 1] - q_start, dim = call->dim_v;
  long num_rows = q_len * call->group, seq_len = call->seq_lens[seq];
  for (long row = 0; row < num_rows; row++) {
    states.max[row] = -INFINITY, states.sum[row] = 0;
    for (long i = 0; i < dim; i++) states.out[row][i] = 0;
  }
  long seen = most(seq_len - q_len - call->window + 1, 0), share = seq_len - seen;
  long first = seen + share * split / call->num_splits;
  long stop = seen + share * (split + 1) / call->num_splits;
  for (; first < stop; first += BLOCK)
    attend_block(call, &states, seq, head, first, least(first + BLOCK, stop));
  for (long row = 0; row < num_rows; row++) {
    long token = split * call->num_tokens + q_start + row / call->group;
    long index = (token * call->num_kv_heads + head) * call->group + row % call->group;
    float sum = states.sum[row]; /* 0 where no key was seen; NaN stays NaN */
    call->lse[index] = sum == 0 ? -INFINITY : states.max[row] + logf(sum);
    for (long i = 0; i < dim; i++)
      call->out[index * dim + i] = sum == 0 ? 0 : states.out[row][i] / sum;
  }
}

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

/* New rows of every token into a cache [num_pages, page_size, heads, dim]; 0, or 1 + a token
   whose slot is not in it. Negative slots are skipped. */
static long append(const float *rows, long token_stride, long head_stride, float *cache,
                   const struct cache *strides, const int64_t *slots, long num_tokens,
                   long num_heads, long dim, long num_pages, long page_size) {
  for (long token = 0; token < num_tokens; token++) {
    long slot = slots[token];
    if (slot < 0) continue;
    if (slot >= num_pages * page_size) return token + 1;
    float *to = cache + slot / page_size * strides->page + slot % page_size * strides->row;
    for (long head = 0; head < num_heads; head++)
      for (long i = 0; i < dim; i++)
        to[head * strides->head + i] = rows[token * token_stride + head * head_stride + i];
  }
  return 0;
}

INLINE struct cache make_cache(const void *data, const void *scales, const int64_t *strides,
                               const int64_t *format) {
  return (struct cache){data, strides[0], strides[1], strides[2], format[0], format[1], format[2],
                        scales, format[3], format[4], format[5], format[6]};
}

/* Keep new keys where `slots` is given, which needs caches of floats, then attend. Returns 0, or 1 + a sequence whose lengths or
   pages are not valid, or -1 - a token whose slot is not. */
long attend_pages(const float *q, void *k, void *v, const void *k_scales, const void *v_scales,
                  const float *levels, const int32_t *pages, const int32_t *seq_lens,
                  const int32_t *starts, const float *new_k, const float *new_v,
                  const int64_t *slots, float *out, float *lse, const int64_t *sizes, float scale,
                  int num_threads) {
  const int64_t *s = sizes;
  struct call call = {.q = q, .q_token = s[0], .q_head = s[1],
                      .k = make_cache(k, k_scales, s + 2, s + 25),
                      .v = make_cache(v, v_scales, s + 5, s + 32), .levels = levels,
                      .pages = pages, .seq_lens = seq_lens,
                      .starts = starts, .out = out, .lse = lse, .num_tokens = s[9],
                      .num_kv_heads = s[10], .group = s[11], .dim_k = s[12], .dim_v = s[13],
                      .num_pages = s[14], .page_columns = s[15], .page_stride = s[16],
                      .page_size = s[17], .num_splits = s[18], .window = s[19],
                      .causal = (int)s[20], .scale = scale};
  long num_seqs = s[8], bad = 0;
  if (slots) {
    bad = append(new_k, s[21], s[22], k, &call.k, slots, s[9], s[10], s[12], s[14], s[17]);
    if (!bad)
      bad = append(new_v, s[23], s[24], v, &call.v, slots, s[9], s[10], s[13], s[14], s[17]);
    if (bad) return -bad;
  }
  for (long seq = 0; seq < num_seqs; seq++)
    if (!is_valid(&call, seq)) return seq + 1;
#pragma omp parallel for collapse(3) schedule(dynamic) num_threads(num_threads)
  for (long seq = 0; seq < num_seqs; seq++)
    for (long head = 0; head < call.num_kv_heads; head++)
      for (long split = 0; split < call.num_splits; split++) attend_task(&call, seq, head, split);
  return 0;
}
