/* Byte-pair encoding of words: of all pairs of neighbours the one of the lowest rank is merged, the
   leftmost of several, until there is none. */
#include <stdint.h>
#include <string.h>

#define MAX_WORD 512 /* bytes: every merge looks at all pairs that are left */
#define NO_RANK INT32_MAX

struct pairs {
  long count;
  const int64_t *keys;       /* [count], left << 32 | right, ascending */
  const int32_t (*merged)[2]; /* [count], rank and token */
};

/* Where a pair is, or -1. */
static long find_pair(const struct pairs *pairs, int32_t left, int32_t right) {
  int64_t key = (int64_t)left << 32 | right;
  long low = 0, high = pairs->count;
  while (low < high) {
    long middle = (low + high) / 2;
    if (pairs->keys[middle] < key) low = middle + 1;
    else high = middle;
  }
  return low < pairs->count && pairs->keys[low] == key ? low : -1;
}

/* Merge a word of n tokens in place; how many are left. */
static long merge_word(const struct pairs *pairs, int32_t *word, long n) {
  long places[MAX_WORD]; /* of the pair that begins at a token */
  for (long i = 0; i + 1 < n; i++) places[i] = find_pair(pairs, word[i], word[i + 1]);
  for (;;) {
    long best = -1;
    int32_t lowest = NO_RANK;
    for (long i = 0; i + 1 < n; i++)
      if (places[i] >= 0 && pairs->merged[places[i]][0] < lowest)
        lowest = pairs->merged[places[i]][0], best = i;
    if (best < 0) return n;
    word[best] = pairs->merged[places[best]][1];
    n--;
    memmove(word + best + 1, word + best + 2, (n - best - 1) * sizeof(*word));
    memmove(places + best, places + best + 1, (n - best) * sizeof(*places));
    if (best > 0) places[best - 1] = find_pair(pairs, word[best - 1], word[best]);
    if (best + 1 < n) places[best] = find_pair(pairs, word[best], word[best + 1]);
  }
}

/* The tokens of words, which end at `ends` in a text; how many, or -1 where a word is too long or
   has a byte that is no token. `tokens` has room for one a byte. */
long merge_pairs(const uint8_t *text, const int64_t *ends, const int32_t *byte_tokens,
                 const int64_t *keys, const int32_t *merged, int32_t *tokens, long num_words,
                 long num_pairs) {
  const struct pairs pairs = {num_pairs, keys, (const int32_t(*)[2])merged};
  long count = 0, start = 0;
  for (long w = 0; w < num_words; start = ends[w++]) {
    long n = ends[w] - start;
    if (n > MAX_WORD) return -1;
    for (long i = 0; i < n; i++)
      if ((tokens[count + i] = byte_tokens[text[start + i]]) < 0) return -1;
    count += merge_word(&pairs, tokens + count, n);
  }
  return count;
}
