/* Attention of few queries in float32 over a paged cache.
   A task is a sequence, a kv head and a part of the keys; it makes the states of all rows that
   read the head: queries of the sequence times heads of the group. */
#include "pages.h"

#define BLOCK 64 /* keys at a time: they stay in the L1 cache for all rows */

struct states {
  float max[MAX_FEW_ROWS], sum[MAX_FEW_ROWS], out[MAX_FEW_ROWS][MAX_DIM];
};

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
    peaks = larger(load(scores + j), peaks);
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

void attend_few(const struct call *call, long seq, long head, long split) {
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
