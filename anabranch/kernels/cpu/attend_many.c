/* Attention of many queries in float32 over a paged cache.
   A task is a tile of rows that read one kv head: queries of a sequence times heads of the group.
   Rows lie across the lanes of vectors, so that elements of keys and values are broadcast from
   where they lie, and the softmax needs no sums across lanes. Blocks of keys end at multiples of
   their size: a row has the same bits in any tile and however its prompt is cut. */
#include "pages.h"

#define ROWS 64   /* of a tile */
#define BLOCK 48  /* keys at a time, a multiple of SUMS: with a tile they stay in the L1 cache */
#define SUMS 6    /* that one pass makes for each vector of rows: keys, or columns of values */
#define PART 128  /* dims that are summed in a row: sums of 256 in one would err twice as much */
#if defined(__AVX512F__)
#define VECTORS 4 /* of rows that a pass takes, as far as there are registers */
#else
#define VECTORS 1
#endif
#define UNROLLED(i, count) _Pragma("GCC unroll 8") for (int i = 0; i < count; i++)

typedef float across[ROWS]; /* a number of every row */
static const across ones = {[0 ... ROWS - 1] = 1};

struct tile {
  across q[MAX_DIM], scores[BLOCK], out[MAX_DIM]; /* transposed: rows are the last dimension */
  across max, sum, decay;
  int32_t from[ROWS], to[ROWS]; /* the first key that a row sees, and one past the last */
};

/* to[m] = to[m] * decay + sum over i in [start, stop) of a(m, i) * b[i], for `count` m from `first`
   on. a(m, i) is a[m][i], or a[i][m] of columns; without decay `to` is not read. */
INLINE void product(const int count, const int of_columns, const float *const *a, long first,
                    const across *b, long start, long stop, across *to, const float *decay) {
  for (int c = 0; c < ROWS; c += VECTORS * LANES) {
    vec sum[SUMS][VECTORS] = {0};
    for (long i = start; i < stop; i++)
      UNROLLED(m, count) {
        float x = of_columns ? a[i][first + m] : a[first + m][i];
        UNROLLED(v, VECTORS) sum[m][v] += x * load(b[i] + c + v * LANES);
      }
    UNROLLED(m, count) UNROLLED(v, VECTORS) {
      int at = c + v * LANES;
      if (decay) sum[m][v] += load(to[first + m] + at) * load(decay + at);
      store(to[first + m] + at, sum[m][v]);
    }
  }
}

/* Scores of keys [first, first + count) become weights; decay is what they leave of the sums. */
static void weigh(struct tile *tile, long first, long count, int all_visible) {
  for (int c = 0; c < ROWS; c += LANES) {
    ivec from = *(ivec *)(tile->from + c), to = *(ivec *)(tile->to + c);
    vec hidden = splat(-INFINITY), before = load(tile->max + c), peak = before, sum = {0};
    for (long j = 0; j < count; j++) {
      vec score = load(tile->scores[j] + c);
      int32_t key = (int32_t)(first + j);
      if (!all_visible) {
        score = choose((key >= from) & (key < to), score, hidden);
        store(tile->scores[j] + c, score);
      }
      peak = larger(score, peak);
    }
    vec pivot = choose(peak == -INFINITY, splat(0), peak); /* of rows that have seen no key */
    for (long j = 0; j < count; j++) {
      vec weight = exp_lanes(load(tile->scores[j] + c) - pivot);
      store(tile->scores[j] + c, weight);
      sum += weight;
    }
    vec decay = exp_lanes(before - pivot);
    store(tile->decay + c, decay);
    store(tile->sum + c, load(tile->sum + c) * decay + sum);
    store(tile->max + c, peak);
  }
}

/* Take keys [first, stop) of a sequence, at most a block, into the states of all rows. */
static void attend_block(const struct call *call, struct tile *tile, long seq, long head,
                         long first, long stop, int all_visible) {
  const float *keys[BLOCK], *values[BLOCK];
  float decoded[2][BLOCK][MAX_DIM];
  long count = stop - first, padded = (count + SUMS - 1) / SUMS * SUMS;
  for (long j = 0; j < count; j++) {
    keys[j] = read_row(&call->k, call, seq, first + j, head, call->dim_k, decoded[0][j]);
    values[j] = read_row(&call->v, call, seq, first + j, head, call->dim_v, decoded[1][j]);
  }
  for (long j = count; j < padded; j++) keys[j] = keys[count - 1]; /* whose scores nobody reads */
  for (long i = 0; i < call->dim_k; i += PART)
    for (long j = 0; j < padded; j += SUMS)
      product(SUMS, 0, keys, j, tile->q, i, least(i + PART, call->dim_k), tile->scores,
              i ? ones : 0);
  weigh(tile, first, count, all_visible);
  long i = 0;
  for (; i + SUMS <= call->dim_v; i += SUMS)
    product(SUMS, 1, values, i, tile->scores, 0, count, tile->out, tile->decay);
  for (; i < call->dim_v; i += 2) /* 2 or 4 are left of a multiple of 16 */
    product(2, 1, values, i, tile->scores, 0, count, tile->out, tile->decay);
}

/* Queries of a tile's rows, and which keys these see; rows past the last are like the last. */
static void read_rows(const struct call *call, struct tile *tile, long seq, long head, long row,
                      long count) {
  long q_start = call->starts[seq], q_len = call->starts[seq + 1] - q_start;
  long seq_len = call->seq_lens[seq];
  for (long r = 0; r < ROWS; r++) {
    long each = row + least(r, count - 1), token = each / call->group;
    long position = seq_len - q_len + token;
    const float *q = call->q + (q_start + token) * call->q_token +
                     (head * call->group + each % call->group) * call->q_head;
    for (long i = 0; i < call->dim_k; i++) tile->q[i][r] = q[i] * call->scale;
    tile->to[r] = (int32_t)most(call->causal ? least(position + 1, seq_len) : seq_len, 0);
    tile->from[r] = (int32_t)most(least(position - call->window + 1, tile->to[r]), 0);
    tile->max[r] = -INFINITY, tile->sum[r] = 0;
  }
  for (long i = 0; i < call->dim_v; i++)
    for (long r = 0; r < ROWS; r++) tile->out[i][r] = 0;
}

static void write_rows(const struct call *call, const struct tile *tile, long seq, long head,
                       long row, long count) {
  for (long r = 0; r < count; r++) {
    long token = call->starts[seq] + (row + r) / call->group;
    long index = (token * call->num_kv_heads + head) * call->group + (row + r) % call->group;
    float sum = tile->sum[r]; /* 0 where no key was seen; NaN stays NaN */
    call->lse[index] = sum == 0 ? -INFINITY : tile->max[r] + logf(sum);
    for (long i = 0; i < call->dim_v; i++)
      call->out[index * call->dim_v + i] = sum == 0 ? 0 : tile->out[i][r] / sum;
  }
}

long num_tiles(const struct call *call, long seq) {
  long rows = (call->starts[seq + 1] - call->starts[seq]) * call->group;
  return (rows + ROWS - 1) / ROWS;
}

void attend_many(const struct call *call, long seq, long head, long number) {
  struct tile tile;
  long row = number * ROWS, rows = (call->starts[seq + 1] - call->starts[seq]) * call->group;
  long count = least(rows - row, ROWS);
  read_rows(call, &tile, seq, head, row, count);
  /* The first row sees the first keys, the last row the last. */
  long first = tile.from[0], stop = tile.to[ROWS - 1];
  for (long next; first < stop; first = next) {
    next = least((first / BLOCK + 1) * BLOCK, stop);
    int all_visible = first >= tile.from[ROWS - 1] && next <= tile.to[0];
    attend_block(call, &tile, seq, head, first, next, all_visible);
  }
  write_rows(call, &tile, seq, head, row, count);
}
