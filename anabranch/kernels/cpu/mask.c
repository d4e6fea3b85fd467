/* Tokens banned by masks of a bit each. */

#include <math.h>
#include <stdint.h>

/* Sets scores [rows of stride], in num_rows listed rows, to -inf where a bit of words is 0. */
void ban_tokens(float *scores, const int64_t *rows, const uint32_t *words, long num_rows,
                long stride, long vocab_size, long num_words) {
  for (long row = 0; row < num_rows; row++) {
    float *score = scores + rows[row] * stride;
    const uint32_t *mask = words + row * num_words;
    for (long word = 0; word * 32 < vocab_size; word++) {
      uint32_t bits = mask[word];
      if (bits == UINT32_MAX) continue;
      long left = vocab_size - word * 32;
      long size = left < 32 ? left : 32;
      for (long bit = 0; bit < size; bit++) {
        float *each = score + word * 32 + bit;
        *each = bits >> bit & 1 ? *each : -INFINITY;
      }
    }
  }
}
