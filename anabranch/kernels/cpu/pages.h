/* A call of attention over a paged cache, as the kernels for few and for many queries read it:
   floats are read where they lie, codes of a quantised cache are decoded a block at a time. */
#include "kernels.h"
#include "vectors.h"

#define MAX_DIM 256        /* of a head, a multiple of 16 */
#define MAX_FEW_QUERIES 8  /* of a sequence; more fill vectors of rows */
#define MAX_FEW_ROWS 64    /* with the heads of a group */

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
  long num_tokens, num_kv_heads, group, dim_k, dim_v, page_columns, page_size, page_stride;
  long num_rows, page_step; /* in the storage; from page to page, 1 if one begins at any row */
  long num_splits, window;
  int causal;
  float scale;
  const float *levels; /* [256], numbers of the codes of E4M3 */
};

INLINE long least(long a, long b) { return a < b ? a : b; }
INLINE long most(long a, long b) { return a > b ? a : b; }

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

INLINE int has_few(const struct call *call, long seq) {
  long q_len = call->starts[seq + 1] - call->starts[seq];
  return q_len <= MAX_FEW_QUERIES && q_len * call->group <= MAX_FEW_ROWS;
}

/* A sequence is served by tasks of its few queries for parts of the keys, or by tiles of rows. */
void attend_few(const struct call *call, long seq, long head, long split);
void attend_many(const struct call *call, long seq, long head, long number);
long num_tiles(const struct call *call, long seq);
