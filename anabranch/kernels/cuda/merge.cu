// The merge of attention states over disjoint key sets. A row is a (token, head) pair; whole rows
// belong to one block, so that a row's LSE can be overwritten once every thread has read it.
//
// merge_pair holds two states in registers and asks for all of its memory before it uses any. Of
// states in the cache it is bound by instructions, and half of them would find addresses: FLAT ones
// have equally spaced rows, and offsets of 32 bits.
// merge_parts takes any number of parts, from up to eight pointers or from one stack.
// Weights are those of merge_stacked in state.py, with its infinities and NaN.
// No header is included: NVRTC and nvcc compile this file as it stands.

using int64 = long long;

constexpr int MAX_SOURCES = 8;
constexpr int MAX_BLOCK = 512;        // threads of a merge_pair block
constexpr int MAX_FLAT_BLOCK = 256;   // the same for FLAT states,
constexpr int FLAT_BLOCKS = 6;        // as many of which share a multiprocessor: 40 registers
constexpr int MAX_PARTS_BLOCK = 256;  // threads of a merge_parts block
constexpr unsigned MINUS_INFINITY = 0xff800000u;

struct State {  // strides in elements; launcher.c fills the same fields
  void* out;    // [num_parts, num_tokens, num_heads, head_dim]
  float* lse;   // [num_parts, num_tokens, num_heads], or null where none is wanted
  int64 out_part, out_token, out_head, out_dim;
  int64 lse_part, lse_token, lse_head;
};

template <int SOURCES>
struct Arguments {
  unsigned num_rows;     // num_tokens * num_heads, at most 2^31 - 1
  unsigned num_heads;    // 1 where every tensor has equally spaced rows: no division then
  unsigned head_dim;
  unsigned num_parts;
  unsigned source_step;  // part p lies in sources[p * source_step]: 0 for a stack, 1 for pointers
  unsigned reserved;     // the states that follow are aligned to 8 bytes
  State merged;
  State sources[SOURCES];
};

// Element types: how two of them become the halves of a 32-bit word, and back.

struct Half {
  unsigned short bits;
  static __device__ float2 unpack(unsigned word) {
    float2 pair;
    asm("{.reg .f16 lo, hi; mov.b32 {lo, hi}, %2; cvt.f32.f16 %0, lo; cvt.f32.f16 %1, hi;}"
        : "=f"(pair.x), "=f"(pair.y)
        : "r"(word));
    return pair;
  }
  static __device__ unsigned pack(float2 pair) {
    unsigned word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(pair.y), "f"(pair.x));
    return word;
  }
};

struct Bfloat16 {
  unsigned short bits;
  static __device__ float2 unpack(unsigned word) {
    return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
  }
  static __device__ unsigned pack(float2 pair) {
    unsigned word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(pair.y), "f"(pair.x));
    return word;
  }
};

struct Float {
  float value;
};

// WIDTH elements on their way between memory and float32, kept as they lie in memory.
template <class T, int WIDTH>
struct Vector {
  static constexpr int WORDS = (sizeof(T) * WIDTH + 3) / 4;
  unsigned words[WORDS];

  __device__ void load(const T* p) {
    if constexpr (WIDTH > 1) {
      static_assert(WORDS == 4, "sources are read 16 bytes at a time");
      const uint4 v = *reinterpret_cast<const uint4*>(p);
      words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    } else if constexpr (sizeof(T) == 2) {
      words[0] = *reinterpret_cast<const unsigned short*>(p);
    } else {
      words[0] = *reinterpret_cast<const unsigned*>(p);
    }
  }

  __device__ void store(T* p) const {
    if constexpr (WIDTH > 1 && WORDS == 2) {
      *reinterpret_cast<uint2*>(p) = make_uint2(words[0], words[1]);
    } else if constexpr (WIDTH > 1) {
#pragma unroll
      for (int i = 0; i < WORDS; i += 4) {
        reinterpret_cast<uint4*>(p)[i / 4] =
            make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
      }
    } else if constexpr (sizeof(T) == 2) {
      *reinterpret_cast<unsigned short*>(p) = static_cast<unsigned short>(words[0]);
    } else {
      *reinterpret_cast<unsigned*>(p) = words[0];
    }
  }

  // sum += share * elements
  __device__ void accumulate(float share, float (&sum)[WIDTH]) const {
#pragma unroll
    for (int i = 0; i < WIDTH; i += 4 / sizeof(T)) {
      if constexpr (sizeof(T) == 4) {
        sum[i] += share * __uint_as_float(words[i]);
      } else {
        const float2 pair = T::unpack(words[i / 2]);
        sum[i] += share * pair.x;
        if constexpr (WIDTH > 1) sum[i + 1] += share * pair.y;
      }
    }
  }

  __device__ void assign(const float (&sum)[WIDTH]) {
#pragma unroll
    for (int i = 0; i < WIDTH; i += 4 / sizeof(T)) {
      if constexpr (sizeof(T) == 4) {
        words[i] = __float_as_uint(sum[i]);
      } else {
        words[i / 2] = T::pack({sum[i], WIDTH > 1 ? sum[i + (WIDTH > 1)] : 0.0f});
      }
    }
  }
};

struct Row {
  unsigned token, head;

  Row() = default;
  __device__ Row(unsigned row, unsigned num_heads) : token(row), head(0) {
    if (num_heads > 1) {
      token = row / num_heads;
      head = row - token * num_heads;
    }
  }
};

template <class T, int WIDTH, bool FLAT = false>
__device__ T* out_at(const State& state, unsigned part, Row row, unsigned dim) {
  T* const out = static_cast<T*>(state.out);
  if constexpr (FLAT) return out + (row.token * static_cast<unsigned>(state.out_token) + dim);
  return out + part * state.out_part + row.token * state.out_token + row.head * state.out_head +
         (WIDTH > 1 ? dim : dim * state.out_dim);
}

template <bool FLAT = false>
__device__ float* lse_at(const State& state, unsigned part, Row row) {
  if constexpr (FLAT) return state.lse + row.token * static_cast<unsigned>(state.lse_token);
  return state.lse + part * state.lse_part + row.token * state.lse_token +
         row.head * state.lse_head;
}

__device__ float pivot_of(float peak) {
  return peak == __uint_as_float(MINUS_INFINITY) ? 0.0f : peak;
}

// The total of the weights, inverted to turn them into shares: the largest weight is 1, so it lies
// between 1 and num_parts and one Newton step is as good as a division. A total of 0 gives shares
// of 0, and NaN gives NaN, as in the definition.
struct Total {
  float inverse;
  bool valid;

  __device__ explicit Total(float total) : valid(total != 0.0f) {
    const float guess = __fdividef(1.0f, total);
    inverse = fmaf(guess, fmaf(-total, guess, 1.0f), guess);
  }
  __device__ float share(float weight) const { return valid ? weight * inverse : 0.0f; }
};

// A launch that may begin before the one ahead of it has ended (Hopper and later) touches no
// memory until this returns. Only then may the launch after it begin.
__device__ void wait_for_sources() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Block: (lanes of a row, rows). Thread (x, y) merges ROWS rows, blockDim.y apart, and of each one
// vector at a time, blockDim.x apart. The lanes of FLAT states are a whole row.
template <class In, class Out, int WIDTH, int ROWS, bool FLAT>
__device__ void merge_pair(const Arguments<2>& a) {
  const unsigned first = blockIdx.x * (blockDim.y * ROWS) + threadIdx.y;
  Row rows[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    // Past the end, the last row once more: loads need no guard, only stores do.
    rows[r] = Row(min(first + r * blockDim.y, a.num_rows - 1), FLAT ? 1 : a.num_heads);
  }
  Vector<In, WIDTH> left[ROWS], right[ROWS];
  const auto load = [&](int r, unsigned dim) {
    left[r].load(out_at<const In, WIDTH, FLAT>(a.sources[0], 0, rows[r], dim));
    right[r].load(out_at<const In, WIDTH, FLAT>(a.sources[1], 0, rows[r], dim));
  };

  wait_for_sources();
  float left_share[ROWS], right_share[ROWS], lse[ROWS];  // the shares begin as LSEs
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    left_share[r] = *lse_at<FLAT>(a.sources[0], 0, rows[r]);
    right_share[r] = *lse_at<FLAT>(a.sources[1], 0, rows[r]);
    load(r, threadIdx.x * WIDTH);
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const float pivot = pivot_of(fmaxf(left_share[r], right_share[r]));
    const float left_weight = expf(left_share[r] - pivot);
    const float right_weight = expf(right_share[r] - pivot);
    const Total total(left_weight + right_weight);
    left_share[r] = total.share(left_weight);
    right_share[r] = total.share(right_weight);
    lse[r] = pivot + logf(left_weight + right_weight);
  }
  __syncthreads();  // in place, another warp may still have to read this LSE

  for (unsigned dim = threadIdx.x * WIDTH;;) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      if (first + r * blockDim.y >= a.num_rows) break;
      float sum[WIDTH] = {};
      left[r].accumulate(left_share[r], sum);
      right[r].accumulate(right_share[r], sum);
      Vector<Out, WIDTH> merged;
      merged.assign(sum);
      merged.store(out_at<Out, WIDTH, FLAT>(a.merged, 0, rows[r], dim));
      if (dim == 0 && a.merged.lse) *lse_at<FLAT>(a.merged, 0, rows[r]) = lse[r];
    }
    if constexpr (FLAT) break;
    dim += blockDim.x * WIDTH;
    if (dim >= a.head_dim) break;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) load(r, dim);
  }
}

// Values of the threads that share a row and a lane, reduced over their groups (threadIdx.z).
template <int N, class Reduce>
__device__ void over_groups(float (&values)[N], float* exchange, Reduce reduce) {
  if (blockDim.z == 1) return;
  const int stride = blockDim.x * blockDim.y;
  const int mine = threadIdx.y * blockDim.x + threadIdx.x;
  __syncthreads();  // the exchange before this one has been read
#pragma unroll
  for (int i = 0; i < N; ++i) {
    exchange[i * MAX_PARTS_BLOCK + threadIdx.z * stride + mine] = values[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; ++i) {
    values[i] = exchange[i * MAX_PARTS_BLOCK + mine];
    for (int group = 1; group < blockDim.z; ++group) {
      values[i] = reduce(values[i], exchange[i * MAX_PARTS_BLOCK + group * stride + mine]);
    }
  }
}

// Block: (lanes of a row, rows, groups). Groups take turns with the parts: many parts of few rows
// would otherwise wait for memory one after the other.
template <class In, class Out, int WIDTH>
__device__ void merge_parts(const Arguments<MAX_SOURCES>& a) {
  __shared__ float exchange[WIDTH * MAX_PARTS_BLOCK];
  const auto larger = [](float x, float y) { return fmaxf(x, y); };
  const auto plus = [](float x, float y) { return x + y; };
  const unsigned index = blockIdx.x * blockDim.y + threadIdx.y;
  const Row row(min(index, a.num_rows - 1), a.num_heads);
  const auto lse_of = [&](unsigned part) {
    return *lse_at(a.sources[part * a.source_step], part, row);
  };

  wait_for_sources();
  float peak[1] = {__uint_as_float(MINUS_INFINITY)}, weight[1] = {};
#pragma unroll 8
  for (unsigned part = threadIdx.z; part < a.num_parts; part += blockDim.z) {
    peak[0] = fmaxf(peak[0], lse_of(part));
  }
  over_groups(peak, exchange, larger);
  const float pivot = pivot_of(peak[0]);
#pragma unroll 8
  for (unsigned part = threadIdx.z; part < a.num_parts; part += blockDim.z) {
    weight[0] += expf(lse_of(part) - pivot);
  }
  over_groups(weight, exchange, plus);
  const Total total(weight[0]);

  for (unsigned start = 0; start < a.head_dim; start += blockDim.x * WIDTH) {
    const unsigned dim = start + threadIdx.x * WIDTH;
    float sum[WIDTH] = {};
    if (dim < a.head_dim) {
#pragma unroll 4
      for (unsigned part = threadIdx.z; part < a.num_parts; part += blockDim.z) {
        const State& source = a.sources[part * a.source_step];
        Vector<In, WIDTH> vector;
        vector.load(out_at<const In, WIDTH>(source, part, row, dim));
        vector.accumulate(total.share(expf(lse_of(part) - pivot)), sum);
      }
    }
    over_groups(sum, exchange, plus);
    if (dim < a.head_dim && threadIdx.z == 0 && index < a.num_rows) {
      Vector<Out, WIDTH> merged;
      merged.assign(sum);
      merged.store(out_at<Out, WIDTH>(a.merged, 0, row, dim));
    }
  }
  __syncthreads();  // in place, another warp may still have to read this LSE
  if (a.merged.lse && threadIdx.x == 0 && threadIdx.z == 0 && index < a.num_rows) {
    *lse_at(a.merged, 0, row) = pivot + logf(weight[0]);
  }
}

// Entry points: one for each pair of element types, and for 16-byte or single-element access.

#define MERGE_PAIR(NAME, IN, OUT, WIDTH, ROWS)                                    \
  extern "C" __global__ void __launch_bounds__(MAX_BLOCK)                         \
      NAME(const __grid_constant__ Arguments<2> a) {                              \
    merge_pair<IN, OUT, WIDTH, ROWS, false>(a);                                   \
  }
#define MERGE_FLAT(NAME, IN, OUT)                                                 \
  extern "C" __global__ void __launch_bounds__(MAX_FLAT_BLOCK, FLAT_BLOCKS)       \
      NAME(const __grid_constant__ Arguments<2> a) {                              \
    merge_pair<IN, OUT, 16 / sizeof(IN), 1, true>(a);                             \
  }
#define MERGE_PARTS(NAME, IN, OUT, WIDTH)                                         \
  extern "C" __global__ void __launch_bounds__(MAX_PARTS_BLOCK)                   \
      NAME(const __grid_constant__ Arguments<MAX_SOURCES> a) {                    \
    merge_parts<IN, OUT, WIDTH>(a);                                               \
  }
#define MERGE(SUFFIX, IN, OUT)                                                    \
  MERGE_PAIR(pair1_vector_##SUFFIX, IN, OUT, 16 / sizeof(IN), 1)                  \
  MERGE_PAIR(pair2_vector_##SUFFIX, IN, OUT, 16 / sizeof(IN), 2)                  \
  MERGE_PAIR(pair1_scalar_##SUFFIX, IN, OUT, 1, 1)                                \
  MERGE_FLAT(flat_vector_##SUFFIX, IN, OUT)                                       \
  MERGE_PARTS(parts_vector_##SUFFIX, IN, OUT, 16 / sizeof(IN))                    \
  MERGE_PARTS(parts_scalar_##SUFFIX, IN, OUT, 1)

MERGE(f16_f16, Half, Half)
MERGE(f16_bf16, Half, Bfloat16)
MERGE(f16_f32, Half, Float)
MERGE(bf16_f16, Bfloat16, Half)
MERGE(bf16_bf16, Bfloat16, Bfloat16)
MERGE(bf16_f32, Bfloat16, Float)
MERGE(f32_f16, Float, Half)
MERGE(f32_bf16, Float, Bfloat16)
MERGE(f32_f32, Float, Float)
