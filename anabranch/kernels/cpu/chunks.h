/* Chunks of a tile, 16 outputs by 32 columns, as codes, scales and minima. */
#include "bytes.h"
#include "matrix.h"

/* Facts of a format, folded by the compiler where the format is a constant. */
INLINE int is_super(const int f) { return f == Q4_K || f == Q5_K || f == Q6_K; }
INLINE int has_min(const int f) { return f == Q4_1 || f == Q5_1 || f == Q4_K || f == Q5_K; }
INLINE int num_bits(const int f) {
  if (f == Q8_0) return 8;
  return f == Q6_K ? 6 : f == Q5_0 || f == Q5_1 || f == Q5_K ? 5 : 4;
}
INLINE int zero_code(const int f) {
  switch (f) {
    case Q4_0: return 8;
    case Q5_0: return 16;
    case Q6_K: return 32;
    case Q8_0: case IQ4_NL: return 128;
    default: return 0;
  }
}
INLINE long span_of(const int f) { return is_super(f) ? MAX_SPAN : CHUNK; }
INLINE long head_bytes(const int f) {
  return 32 * (1 + has_min(f)) + (is_super(f) ? 256 : 0); /* 8 scales and minima, or 16 scales */
}
INLINE long chunk_bytes(const int f) { return num_bits(f) * 64; }

static const uint8_t iq4_nl_levels[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                          129, 141, 153, 166, 181, 197, 217, 241}; /* plus 128 */

struct head {
  vec scale, min;
};

struct chunk {
  bytes codes[8];
  vec scale[2], min; /* a scale for either half where the format is Q6_K */
};

INLINE struct head read_head(const int f, const uint8_t *tile) {
  struct head head = {from_halves(tile), {0}};
  if (has_min(f)) head.min = from_halves(tile + 32);
  return head;
}

INLINE void read_codes(const int f, const uint8_t *from, bytes *codes) {
  if (f == Q8_0) {
    for (int v = 0; v < 8; v++) codes[v] = load_bytes(from + 64 * v);
    return;
  }
  const uint8_t *low = from + 64 * (num_bits(f) - 4);
  for (int v = 0; v < 4; v++) {
    bytes both = load_bytes(low + 64 * v);
    codes[v] = bits_of(both, 0, 15);
    codes[v + 4] = bits_of(both, 4, 15);
  }
  if (num_bits(f) == 5) {
    bytes high = load_bytes(from);
    for (int v = 0; v < 8; v++) codes[v] = with_high_bits(codes[v], bits_of(high, v, 1));
  }
  if (num_bits(f) == 6)
    for (int v = 0; v < 8; v++) {
      bytes high = load_bytes(from + v / 4 * 64);
      codes[v] = with_high_bits(codes[v], bits_of(high, v % 4 * 2, 3));
    }
  if (f == IQ4_NL)
    for (int v = 0; v < 8; v++) codes[v] = look_up(iq4_nl_levels, codes[v]);
}

INLINE void read_chunk(const int f, const uint8_t *tile, struct head head, int i,
                       struct chunk *to) {
  read_codes(f, tile + head_bytes(f) + i * chunk_bytes(f), to->codes);
  to->scale[0] = to->scale[1] = head.scale;
  to->min = head.min;
  if (f == Q6_K) {
    for (int half = 0; half < 2; half++)
      to->scale[half] *= from_signed_bytes(tile + 32 + 16 * (2 * i + half));
  } else if (is_super(f)) {
    to->scale[0] = to->scale[1] = head.scale * from_bytes(tile + 64 + 16 * i);
    to->min *= -from_bytes(tile + 64 + 128 + 16 * i);
  }
}
