// Functions for all kernels of softmax_matmul: tiles in shared memory, the steps of a matmul, and
// masks.
//
// A step is 32 bytes of a row along K: 16 elements of 16 bits, or 8 fp32 elements. Each of the four
// registers of a left operand holds 4 bytes of the step. Which 4 bytes does not depend on the type.
// Therefore ldmatrix loads left operands of every type.
#pragma once

#include <type_traits>

#include "attention/score_scale.h"
#include "core/index.h"
#include "core/launch.h"
#include "device/mma_sync.cuh"
#include "device/vec.cuh"
#include "ops/softmax_matmul/softmax_matmul.h"
#include "softmax/parts.cuh"

namespace torchweld {

constexpr int kStepBytes = 32;
// The number of bytes of a row that one fragment register holds in four lanes.
constexpr int kQuadBytes = 16;
constexpr int kPitchPadBytes = 16;  // bytes of padding per row, in tiles that ldmatrix loads
constexpr int kPitchPadElems = 8;   // elements of padding per row, in tiles loaded by column

template <typename T>
constexpr int kPerWord = 4 / sizeof(T);

// Probabilities in fp16 are multiplied by 2^kProbabilityBias before they are rounded. Otherwise
// probabilities below 2^-24 would become 0.
template <typename T>
constexpr float kProbabilityBias = 0.f;
template <>
constexpr float kProbabilityBias<__half> = 15.f;

// Returns 2^kProbabilityBias * exp(z) for the backward. The exponential is one instruction for
// 16-bit types. Results that are subnormal in fp32 are kept for bf16 and become 0 for fp16.
template <typename T>
__device__ __forceinline__ float biased_exp(float z) {
  if constexpr (sizeof(T) == 4) return expf(z);
  const float exponent = fmaf(z, kLog2e, kProbabilityBias<T>);
  return std::is_same_v<T, __half> ? exp2_approx_ftz(exponent) : exp2_approx(exponent);
}

template <typename T>
__device__ __forceinline__ void unpack_word(float (&to)[kPerWord<T>], uint32_t word) {
  if constexpr (sizeof(T) == 4) {
    to[0] = __uint_as_float(word);
  } else {
    const auto pair = *reinterpret_cast<const Vec<T, 2>*>(&word);
    to[0] = to_float(pair.values[0]);
    to[1] = to_float(pair.values[1]);
  }
}

template <typename T>
__device__ __forceinline__ uint32_t pack_word(const float (&from)[kPerWord<T>]) {
  if constexpr (sizeof(T) == 4) {
    return __float_as_uint(from[0]);
  } else {
    return pack_pair<T>(from[0], from[1]);
  }
}

// Returns the elementwise maximum of two words. A word has one fp32 value or two 16-bit values. If
// one of two compared values is NaN, the result is the other value.
template <typename T>
__device__ __forceinline__ uint32_t max_of_words(uint32_t a, uint32_t b);
template <>
__device__ __forceinline__ uint32_t max_of_words<float>(uint32_t a, uint32_t b) {
  return __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b)));
}
template <>
__device__ __forceinline__ uint32_t max_of_words<__half>(uint32_t a, uint32_t b) {
  const __half2 m = __hmax2(*reinterpret_cast<__half2*>(&a), *reinterpret_cast<__half2*>(&b));
  return *reinterpret_cast<const uint32_t*>(&m);
}
template <>
__device__ __forceinline__ uint32_t max_of_words<__nv_bfloat16>(uint32_t a, uint32_t b) {
  const __nv_bfloat162 m =
      __hmax2(*reinterpret_cast<__nv_bfloat162*>(&a), *reinterpret_cast<__nv_bfloat162*>(&b));
  return *reinterpret_cast<const uint32_t*>(&m);
}

// Word r of a left operand holds kPerWord values of one row, row lane / 4 + 8 * (r % 2) of 16.
// Returns the index of the column of value `half` of this word, counted from the start of the step.
template <typename T>
__device__ __forceinline__ int step_column(int r, int half) {
  return threadIdx.x % 4 * kPerWord<T> + half + (r / 2) * (kQuadBytes / int(sizeof(T)));
}

// The left operand (16, step) of an mma. multiply() issues the mma with 8 columns of the right
// operand.
template <typename T, bool kTf32>
struct LeftOperand {
  uint32_t a[4];
  __device__ __forceinline__ explicit LeftOperand(const uint32_t (&words)[4])
      : a{words[0], words[1], words[2], words[3]} {}
  template <bool kWholeRight>
  __device__ __forceinline__ void multiply(float (&acc)[4], uint32_t b0, uint32_t b1) const {
    mma_16816<T>(acc, a, b0, b1);
  }
};

template <>
struct LeftOperand<float, true> {
  uint32_t a[4];
  __device__ __forceinline__ explicit LeftOperand(const uint32_t (&words)[4]) {
#pragma unroll
    for (int r = 0; r < 4; ++r) a[r] = round_to_tf32(__uint_as_float(words[r]));
  }
  template <bool kWholeRight>
  __device__ __forceinline__ void multiply(float (&acc)[4], uint32_t b0, uint32_t b1) const {
    mma_1688(acc, a, round_to_tf32(__uint_as_float(b0)), round_to_tf32(__uint_as_float(b1)));
  }
};

// Returns the value minus its two TF32 terms. This rest is the last bit of the fp32 value.
__device__ __forceinline__ uint32_t last_bit(uint32_t value, const SplitTf32& terms) {
  const float rest = __uint_as_float(value) - __uint_as_float(terms.big);
  return terms.small == 0u ? 0u : __float_as_uint(rest - __uint_as_float(terms.small));
}

// Multiplies the left operand with fp32 accuracy, in three TF32 mma instructions. If an element of
// the right operand has a last bit that its two TF32 terms don't hold, a fourth mma adds this bit.
// Therefore the product of a probability of 1 and a value is exactly this value.
// NOTE: each mma starts from zero, and ordinary additions add its result to the accumulator. If the
// tensor core added to the accumulator, it would truncate the sum.
template <>
struct LeftOperand<float, false> {
  uint32_t big[4], small[4], cross[4];
  __device__ __forceinline__ explicit LeftOperand(const uint32_t (&words)[4]) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const SplitTf32 split(__uint_as_float(words[r]));
      big[r] = split.big;
      small[r] = split.small;
      cross[r] = split.cross;
    }
  }
  template <bool kWholeRight>
  __device__ __forceinline__ void multiply(float (&acc)[4], uint32_t b0, uint32_t b1) const {
    const SplitTf32 first(__uint_as_float(b0)), second(__uint_as_float(b1));
    float low[4] = {}, high[4] = {};
    mma_1688(low, small, first.cross, second.cross);
    mma_1688(low, cross, first.small, second.small);
    if constexpr (kWholeRight) mma_1688(low, cross, last_bit(b0, first), last_bit(b1, second));
    mma_1688(high, big, first.big, second.big);
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[i] += high[i] + low[i];
  }
};

// Loads the words of a left operand from 16 rows of a tile. The step starts at s_step.
template <typename T>
__device__ __forceinline__ void load_left(uint32_t (&words)[4], const T* s_step, int pitch) {
  const int lane = threadIdx.x % kWarp;
  load_matrix_4(words, shared_address(s_step + lane % 16 * pitch +
                                      lane / 16 * (kQuadBytes / int(sizeof(T)))));
}

// Computes acc (16, kColumns) += left (16, step) @ B. B (step, kColumns) is a block of rows of a
// tile. s_rows is the address of the first of these rows.
template <typename T, bool kTf32, int kColumns, int kPitch>
__device__ __forceinline__ void multiply_rows(float (&acc)[kColumns / 8][4],
                                              const LeftOperand<T, kTf32>& left, const T* s_rows) {
  const int lane = threadIdx.x % kWarp;
  if constexpr (sizeof(T) == 2) {
    const uint32_t s_row = shared_address(s_rows + lane % 16 * kPitch + lane / 16 * 8);
#pragma unroll
    for (int n = 0; n < kColumns / 8; n += 2) {
      uint32_t b[4];
      load_matrix_4_transposed(b, s_row + n * 16);
      left.template multiply</*kWholeRight=*/true>(acc[n], b[0], b[1]);
      left.template multiply</*kWholeRight=*/true>(acc[n + 1], b[2], b[3]);
    }
  } else {
    const T* s_column = s_rows + lane % 4 * kPitch + lane / 4;
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      left.template multiply</*kWholeRight=*/true>(acc[n], __float_as_uint(s_column[n * 8]),
                                                   __float_as_uint(s_column[4 * kPitch + n * 8]));
    }
  }
}

// Computes acc (16, kKeys) += left (16, step) @ B^T. B (kKeys, step) is a block of columns of a
// tile. s_step is the address of the first of these columns.
template <typename T, bool kTf32, int kKeys, int kPitch>
__device__ __forceinline__ void multiply_transposed(float (&acc)[kKeys / 8][4],
                                                    const LeftOperand<T, kTf32>& left,
                                                    const T* s_step) {
  const int lane = threadIdx.x % kWarp;
  const uint32_t s_row = shared_address(s_step + (lane / 16 * 8 + lane % 8) * kPitch +
                                        lane / 8 % 2 * (kQuadBytes / int(sizeof(T))));
#pragma unroll
  for (int n = 0; n < kKeys / 8; n += 2) {
    uint32_t b[4];
    load_matrix_4(b, s_row + n * 8 * kPitch * int(sizeof(T)));
    left.template multiply</*kWholeRight=*/false>(acc[n], b[0], b[1]);
    left.template multiply</*kWholeRight=*/false>(acc[n + 1], b[2], b[3]);
  }
}

// Loads a tile (kRows, kColumns) from g_tile. The function loads the first `columns` columns of
// every row for which reads_row(row) is true. All other elements become 0 and are not read. The
// load is complete after copy_async_wait and a barrier.
template <int kRows, int kColumns, int kPitch, int kThreads, typename T, typename ReadsRow>
__device__ __forceinline__ void load_tile_of(T* s_tile, const T* g_tile, int64_t row_stride,
                                             const ReadsRow& reads_row, int columns, bool aligned) {
  constexpr int kElems = kVectorBytes / sizeof(T);
  constexpr int kRowChunks = kColumns / kElems;
  static_assert(kColumns % kElems == 0 && kThreads % kRowChunks == 0);
  static_assert(kRows % (kThreads / kRowChunks) == 0 && kRows * kColumns % kThreads == 0);
  if (aligned) {
    constexpr int kRowStep = kThreads / kRowChunks;
    const int first = threadIdx.x / kRowChunks, column = threadIdx.x % kRowChunks * kElems;
    const int bytes = min(max(columns - column, 0), kElems) * int(sizeof(T));
    const uint32_t s_chunk = shared_address(s_tile + first * kPitch + column);
    const T* g_chunk = g_tile + first * row_stride + column;
#pragma unroll
    for (int i = 0; i < kRows / kRowStep; ++i) {
      const int row = first + i * kRowStep;
      const bool reads = reads_row(row) && bytes > 0;
      copy_async_16(s_chunk + i * kRowStep * kPitch * int(sizeof(T)), reads ? g_chunk : g_tile,
                    reads ? bytes : 0);
      g_chunk += kRowStep * row_stride;
    }
    return;
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < kRows * kColumns; i += kThreads) {
    const int row = i / kColumns, column = i % kColumns;
    const bool reads = reads_row(row) && column < columns;
    s_tile[row * kPitch + column] = reads ? g_tile[row * row_stride + column] : from_float<T>(0.f);
  }
}

// The version of load_tile_of that loads rows [begin, end).
template <int kRows, int kColumns, int kPitch, int kThreads, typename T>
__device__ __forceinline__ void load_tile(T* s_tile, const T* g_tile, int64_t row_stride, int begin,
                                          int end, int columns, bool aligned) {
  load_tile_of<kRows, kColumns, kPitch, kThreads>(
      s_tile, g_tile, row_stride, [=](int row) { return row >= begin && row < end; }, columns,
      aligned);
}

// Stores columns `column` and `column` + 1 of a row. Columns from `columns` on are not stored. If
// `even` is true, every row of the tensor starts on a boundary of two elements.
template <typename T>
__device__ __forceinline__ void store_pair(T* g_row, int column, int columns, bool even,
                                           float first, float second) {
  if (even) {
    if (column < columns) {
      store_vec(g_row + column, Vec<T, 2>{from_float<T>(first), from_float<T>(second)});
    }
    return;
  }
  if (column < columns) g_row[column] = from_float<T>(first);
  if (column + 1 < columns) g_row[column + 1] = from_float<T>(second);
}

// The head of a block, and the padding of the head's sequence.
struct HeadIndex {
  int64_t batch, head, flat;
  int64_t pad;

  __device__ __forceinline__ HeadIndex(const SoftmaxMatmulProblem& problem, int64_t flat)
      : batch(flat / problem.nheads), head(flat - batch * problem.nheads), flat(flat) {
    pad = problem.mask.pad(batch);
  }

  template <typename T>
  __device__ __forceinline__ const T* of(const HeadsOperand& operand) const {
    return static_cast<const T*>(operand.data) + batch * operand.batch_stride +
           head * operand.head_stride;
  }
};

// The keys that a block of query rows sees.
struct TileMask {
  KeyRange any;      // contains every key that a row of the block sees; {0, 0} if none
  KeyRange all;      // every row of the warp sees all these keys
  KeyRange rows[2];  // the keys that rows lane / 4 and lane / 4 + 8 of the warp see

  // Returns the mask of a block with rows [first_row, first_row + count). The mask has only
  // `causal` and leftpad.
  static __device__ __forceinline__ TileMask causal(const MaskParams& mask, int64_t pad,
                                                    int64_t first_row, int count) {
    const KeyRange first = mask.row_keys(first_row, pad);
    const KeyRange last = mask.row_keys(first_row + count - 1, pad);
    TileMask tile;
    tile.any = {last.begin, last.empty() ? 0 : last.end};
    tile.all = {pad, first.empty() ? 0 : first.end};
    const int64_t row = first_row + threadIdx.x / kWarp * 16 + threadIdx.x % kWarp / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      tile.rows[i].begin = pad;
      tile.rows[i].end = row + 8 * i < mask.seqlen_q ? mask.row_keys(row + 8 * i, pad).end : 0;
    }
    return tile;
  }

  // Returns the mask of a block under a general mask. The block's rows start at first_row of
  // `sequence`. All threads of the block call this function.
  static __device__ __forceinline__ TileMask general(const MaskParams& mask,
                                                     const SequenceMask& sequence,
                                                     int64_t first_row) {
    __shared__ long long s_first, s_last;
    if (threadIdx.x == 0) s_first = mask.seqlen_k, s_last = 0;
    __syncthreads();
    TileMask tile;
    int64_t all_begin = 0, all_end = mask.seqlen_k;
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t row = first_row + threadIdx.x / kWarp * 16 + lane / 4 + 8 * i;
      tile.rows[i] = {0, 0};
      if (row >= mask.seqlen_q) continue;
      const KeyRange keys = mask.row_keys(row, sequence);
      if (!keys.empty()) {
        tile.rows[i] = keys;
        if (lane % 4 == 0) {
          atomicMin(&s_first, keys.begin);
          atomicMax(&s_last, keys.end);
        }
      }
      all_begin = max(all_begin, tile.rows[i].begin);
      all_end = min(all_end, tile.rows[i].end);
    }
#pragma unroll
    for (int step = 4; step < kWarp; step *= 2) {
      all_begin = max(all_begin, __shfl_xor_sync(~0u, all_begin, step));
      all_end = min(all_end, __shfl_xor_sync(~0u, all_end, step));
    }
    tile.all = {all_begin, all_end};
    __syncthreads();
    tile.any.end = s_last;
    tile.any.begin = tile.any.end > 0 ? s_first : 0;
    return tile;
  }
};

// Applies the scale and the soft cap to a score and subtracts the row's lse. The backward kernels
// use it if kMasked.
template <typename T>
struct Logits {
  float scale, softcap, cap;

  __device__ __forceinline__ Logits(float scale, float softcap)
      : scale(scale), softcap(softcap), cap(softcap > 0.f ? scale / softcap : 0.f) {}

  // Returns {logit(score) - lse, the slope of the cap at the score}.
  __device__ __forceinline__ float2 operator()(float score, float lse) const {
    if (softcap == 0.f) return {fmaf(score, scale, -lse), 1.f};
    const float t = tanh_of<sizeof(T) == 4>(score * cap);
    return {fmaf(softcap, t, -lse), 1.f - t * t};
  }
};

// Calls body(T{}, tf32). tf32 is a compile-time constant.
template <typename Body>
void dispatch_math(const SoftmaxMatmulProblem& problem, const Body& body) {
  switch (problem.dtype) {
    case DType::kFloat16:
      return body(__half{}, std::false_type{});
    case DType::kBFloat16:
      return body(__nv_bfloat16{}, std::false_type{});
    default:
      return problem.tf32 ? body(float{}, std::true_type{}) : body(float{}, std::false_type{});
  }
}

// Calls body(T{}, tf32, columns). `columns` is the number of columns of value in a block. tf32 and
// `columns` are compile-time constants.
template <typename Body>
void dispatch_columns(const SoftmaxMatmulProblem& problem, const Body& body) {
  dispatch_math(problem, [&](auto element, auto tf32) {
    problem.head_dim_v <= 64 ? body(element, tf32, std::integral_constant<int, 64>{})
                             : body(element, tf32, std::integral_constant<int, 128>{});
  });
}

// Launches `blocks` blocks in one or more grids of at most kMaxGrid blocks each. The last argument
// of the kernel is the index of the grid's first block.
template <typename Kernel, typename Params>
void launch_blocks(Kernel kernel, int64_t blocks, int threads, size_t shared_bytes,
                   cudaStream_t stream, const Params& params) {
  for_each_grid_of(blocks, [&](int64_t first, int64_t count) {
    launch_kernel(kernel, {count, static_cast<unsigned>(threads), static_cast<int>(shared_bytes)},
                  stream, params, first);
  });
}

}  // namespace torchweld
