/* Weights [n, k] as kernels read them: parts of different formats, whose outputs follow each other.
   A part is panels of PANEL outputs; a panel is tiles of all its outputs and `span` columns. Tiles
   hold what ggml's blocks of the same name hold, for 16 outputs side by side:

     scales [16] halves, minima [16] halves         as far as the format has them
     scales of sub-blocks [count][16] bytes, minima of sub-blocks [count][16] bytes
     chunks of 32 columns: high bits, then low bits of codes

   Codes of a chunk are 8 vectors of 64 bytes, vector v being columns 4 v to 4 v + 3 of output 0,
   then of output 1, and so on. Four bits are kept of two vectors in one, v and v + 4; the fifth
   bits are one vector, of vector v in bit v; the fifth and sixth are two, of vector v in bits
   2 (v % 4) and above of vector v / 4. */
#include <stdint.h>

#define PANEL 16        /* outputs of a panel */
#define FLOAT_PANEL 32  /* outputs of a panel of floats, [k, 32] */
#define CHUNK 32        /* columns that share a scale of the inputs */
#define MAX_SPAN 256    /* columns of a tile */
#define CHUNK_ROWS 192  /* whose inputs stay in the L2 cache while panels pass by */

enum format { F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, Q4_K, Q5_K, Q6_K };

struct part {
  int64_t format, n;
  const uint8_t *data;
};

struct matrix {
  int64_t n, k, has_float_inputs, num_parts;
  struct part parts[];
};

/* Inputs of a chunk in 8 bits: x is about scale * codes. */
struct inputs {
  int8_t codes[CHUNK];
  float scale, sum;   /* sum is scale times that of the codes */
  int32_t minus[3];   /* the sums of the codes of either half and of all, negated */
};

/* Where the sums of a panel go. */
struct outputs {
  float *y;                     /* [rows, n], at the first output of the panel */
  const float *bias, *residual; /* [n] and like y, or null */
  long n, width;                /* of a row; outputs of the panel */
};

/* Sums [count, panel] as outputs of rows from `row` on. */
static inline void write_sums(const float *sums, long panel, long row, long count,
                              struct outputs to) {
  for (long r = 0; r < count; r++)
    for (long i = 0; i < to.width; i++) {
      long at = (row + r) * to.n + i;
      float y = sums[r * panel + i] + (to.bias ? to.bias[i] : 0);
      to.y[at] = y + (to.residual ? to.residual[at] : 0);
    }
}

void multiply_codes(int format, const struct inputs *x, const uint8_t *w, long rows, long k,
                    struct outputs to);
void multiply_expanded(int format, const float *x, const uint8_t *w, long rows, long k,
                       struct outputs to);
void quantise(const float *x, struct inputs *to, long k);
void expand_tile(int format, const uint8_t *tile, float *to); /* [span, 16] */
long tile_bytes(int format);
long tile_span(int format);
