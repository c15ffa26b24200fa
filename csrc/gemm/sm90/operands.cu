// Makes K-major copies of fp32 operands for wgmma. For TF32 the copy holds the fp32 values. For
// exact fp32 the copy holds three bf16 terms of each value, the largest first; the sum of the terms
// is the value. One kernel launch copies both operands, if both need a copy.
//
// NOTE: the two smaller terms of inf and NaN are 0; bf16x3_mainloop handles such terms. A
// finite value that would round to inf in bf16 is truncated instead.
#include "core/fast_divide.h"
#include "core/index.h"
#include "core/launch.h"
#include "device/mma_sync.cuh"
#include "device/sm90/dependent_launch.cuh"
#include "gemm/sm90/launch.h"

namespace torchweld::sm90 {
namespace {

// A block copies a tile of 64 rows and 64 elements along K.
constexpr int kThreads = 256, kTile = 64;

// Returns K, rounded up to a multiple of eight.
TW_HOST_DEVICE int64_t padded_k(int64_t k) { return divide_up(k, 8) * 8; }

struct Source {
  const float* data;
  int64_t row_stride, k_stride, batch_stride, rows, batch;
  // half_rows is the row, and k_half is the column, at which the second matrix of a pair begins.
  int64_t half_rows, k_half;
  int64_t second_half;  // added to the offset of every value in a pair's second matrix
  void* to;             // the copy; its shape is (batch, terms, rows, padded_k(k))
  // The number of blocks that copy one slice of K in one batch, or 0 if the operand needs no copy.
  uint32_t blocks;

  // If `gated` is true, the operand is a pair of matrices with rows / 2 rows each.
  Source(const GemmOperand& o, int64_t rows, int64_t batch, bool gated, GemmMath math, void* to)
      : data(static_cast<const float*>(o.data)),
        row_stride(o.row_stride),
        k_stride(o.k_stride),
        batch_stride(o.batch_stride),
        rows(rows),
        batch(o.batch_stride == 0 ? 1 : batch),
        half_rows(gated ? rows / 2 : rows),
        k_half(o.k_half > 0 ? o.k_half : INT64_MAX),
        second_half(gated ? o.half_stride - half_rows * o.row_stride : o.half_jump()),
        to(to),
        blocks(writes_operand(math, k_stride == 1) ? uint32_t(divide_up(rows, kTile)) : 0) {}

  int64_t bytes(int64_t k, GemmMath math) const {
    return blocks == 0 ? 0 : batch * bf16x3_terms(math) * rows * padded_k(k) * elem_bytes(math);
  }

  // Returns the offset of the value at (row, k), in elements.
  __device__ __forceinline__ int64_t at(int64_t row, int64_t k) const {
    return row * row_stride + k * k_stride + (row >= half_rows || k >= k_half ? second_half : 0);
  }
};

struct Params {
  Source a, b;
  int64_t k;
  FastDivisor k_slices;  // the number of slices of kTile elements along K
  uint32_t a_blocks;     // the number of blocks that copy a
};

// Writes the bf16 terms of eight adjacent values of a row. to_next is the distance between two
// terms of the same value, in elements.
__device__ __forceinline__ void write_bf16x3_terms(const float (&v)[8], __nv_bfloat16* g_to,
                                                   int64_t to_next) {
  uint32_t terms[3][4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float check = 0.f;
    const SplitBf16</*kHandlesNonFinite=*/true> split(v[2 * i], v[2 * i + 1], check);
    terms[0][i] = split.high;
    terms[1][i] = split.middle;
    terms[2][i] = split.low;
  }
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    *reinterpret_cast<uint4*>(g_to + i * to_next) =
        make_uint4(terms[i][0], terms[i][1], terms[i][2], terms[i][3]);
  }
}

__device__ __forceinline__ void write_values(const float (&v)[8], float* g_to) {
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    *reinterpret_cast<float4*>(g_to + i) = make_float4(v[i], v[i + 1], v[i + 2], v[i + 3]);
  }
}

template <bool kBf16x3>
__global__ void __launch_bounds__(kThreads) operands_kernel(const __grid_constant__ Params p) {
  // The padding element puts values with the same row and different k in different banks.
  constexpr int kPitch = kTile + 1;
  __shared__ float s_tile[kTile * kPitch];  // the layout is [k][row]
  griddep_launch_dependents();
  griddep_wait();
  const bool is_a = blockIdx.x < p.a_blocks;
  const Source& from = is_a ? p.a : p.b;
  const uint32_t block = is_a ? blockIdx.x : blockIdx.x - p.a_blocks;
  const uint32_t strip = p.k_slices.divide(block);
  const int64_t first_k = int64_t(block - strip * p.k_slices.divisor()) * kTile;
  const int64_t batch = strip / from.blocks, first_row = int64_t(strip % from.blocks) * kTile;
  const float* g_from = from.data + batch * from.batch_stride;
  const int64_t row_elems = padded_k(p.k);
  const auto write = [&](const float (&v)[8], int64_t row, int64_t k) {
    const int64_t terms = kBf16x3 ? 3 : 1;
    const int64_t at = (batch * terms * from.rows + row) * row_elems + k;
    if constexpr (kBf16x3) {
      write_bf16x3_terms(v, static_cast<__nv_bfloat16*>(from.to) + at, from.rows * row_elems);
    } else {
      write_values(v, static_cast<float*>(from.to) + at);
    }
  };
  const bool k_major = from.k_stride == 1;
  if (!k_major) {
    // The source is MN-major, so a thread loads the values of four adjacent rows at once. The
    // number of rows is a multiple of four.
#pragma unroll
    for (int i = threadIdx.x; i < kTile * kTile / 4; i += kThreads) {
      const int row = i % (kTile / 4) * 4, k = i / (kTile / 4);
      float4 v = {0.f, 0.f, 0.f, 0.f};
      if (first_row + row < from.rows && first_k + k < p.k) {
        v = *reinterpret_cast<const float4*>(g_from + from.at(first_row + row, first_k + k));
      }
      float* s_to = s_tile + k * kPitch + row;
      s_to[0] = v.x;
      s_to[1] = v.y;
      s_to[2] = v.z;
      s_to[3] = v.w;
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kTile * kTile / 8 / kThreads; ++i) {
    const int item = i * kThreads + threadIdx.x;
    const int k = item % (kTile / 8) * 8, row = item / (kTile / 8);
    if (first_row + row >= from.rows || first_k + k >= p.k) continue;
    float v[8];
    const int64_t to = first_row + row;
    if (k_major) {
      const float4* g_values = reinterpret_cast<const float4*>(g_from + from.at(to, first_k + k));
      const float4 left = g_values[0];
      const float4 right = first_k + k + 4 < p.k ? g_values[1] : float4{0.f, 0.f, 0.f, 0.f};
      v[0] = left.x, v[1] = left.y, v[2] = left.z, v[3] = left.w;
      v[4] = right.x, v[5] = right.y, v[6] = right.z, v[7] = right.w;
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] = s_tile[(k + j) * kPitch + row];
    }
    write(v, to, first_k + k);
  }
}

GemmMath math_of(const GemmParams& p) { return gemm_math(p.dtype, p.tf32); }

Source source_of_a(const GemmParams& p) {
  return {p.a, p.m, p.batch, false, math_of(p), p.written};
}

Source source_of_b(const GemmParams& p, void* to) {
  const bool gated = p.epilogue.gated;
  return {p.b, gated ? 2 * p.n : p.n, p.batch, gated, math_of(p), to};
}

}  // namespace

int64_t written_bytes(const GemmParams& p) {
  return source_of_a(p).bytes(p.k, math_of(p)) + source_of_b(p, nullptr).bytes(p.k, math_of(p));
}

WrittenOperands write_operands(const GemmParams& p, cudaStream_t stream) {
  const GemmMath math = math_of(p);
  const int terms = bf16x3_terms(math);
  const Source a = source_of_a(p);
  const Source b = source_of_b(p, static_cast<char*>(p.written) + a.bytes(p.k, math));
  const int64_t k_slices = divide_up(p.k, kTile);
  const int64_t a_blocks = a.batch * a.blocks * k_slices, b_blocks = b.batch * b.blocks * k_slices;
  const Params params = {a, b, p.k, FastDivisor(k_slices), uint32_t(a_blocks)};
  Grid grid(a_blocks + b_blocks, kThreads);
  grid.overlaps = true;
  launch_kernel(math == GemmMath::kFloat32 ? operands_kernel<true> : operands_kernel<false>, grid,
                stream, params);
  const int64_t row_elems = padded_k(p.k);
  const auto operand = [&](const Source& s, int halves) -> GemmOperand {
    return {s.to, row_elems, 1, s.batch == 1 && p.batch > 1 ? 0 : terms * s.rows * row_elems,
            s.rows / halves * row_elems};
  };
  return {operand(a, 1), operand(b, p.epilogue.gated ? 2 : 1)};
}

}  // namespace torchweld::sm90
