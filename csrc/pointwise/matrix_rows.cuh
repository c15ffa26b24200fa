// A pass that only sums the rows of a (rows, n) matrix of 16-bit elements (matrix_pass.h). Each
// block processes one row.
//
// In each iteration a thread makes kLoads accesses to every matrix, and all these accesses are in
// flight together. Consecutive accesses of a thread are blockDim.x accesses apart. At the end of
// the row, the block adds up the sums of its warps. The size of a row must be a multiple of 16
// bytes.
#pragma once

#include "pointwise/matrix_pass.cuh"

namespace torchweld {

template <typename T, typename F>
constexpr bool takes_whole_rows() {
  return sizeof(T) == 2 && F::kRowSums && !F::kColumnSums && !F::kColumnValues;
}

template <typename T, typename F>
__global__
__launch_bounds__(kMatrixRowTile.threads, kMatrixRowTile.blocks_per_sm) void matrix_rows_kernel(
    const __grid_constant__ MatrixArgs<T> args, const F f) {
  static_assert(takes_whole_rows<T, F>() && F::kReads > 0);
  constexpr int kElems = 16 / sizeof(T), kLoads = kMatrixRowTile.loads, kReads = F::kReads;
  const int64_t row = blockIdx.x;
  const int stride = static_cast<int>(blockDim.x);
  const int64_t accesses = args.plan.n / kElems, step = int64_t{stride} * kElems;
  const T* g_in[kReads];
#pragma unroll
  for (int i = 0; i < kReads; ++i) {
    g_in[i] = args.g_in[i] + row * args.in_row_stride[i] + threadIdx.x * kElems;
  }
  T* g_out = F::kWrites ? args.g_out + row * args.plan.n + threadIdx.x * kElems : nullptr;
  const float y = F::kRowValues ? to_float(args.g_y[row]) : 0.f;

  ColumnSum<true> sum = {};
#pragma unroll 1
  for (int64_t at = threadIdx.x; at < accesses; at += kLoads * stride) {
    const int left = static_cast<int>(min(accesses - at, int64_t{kLoads} * stride));
    uint4 r_in[kLoads][kReads];
#pragma unroll
    for (int a = 0; a < kLoads; ++a) {
#pragma unroll
      for (int i = 0; i < kReads; ++i) {
        r_in[a][i] = load_words_if(g_in[i], a * stride < left);
        g_in[i] += step;
      }
    }
    float sums[2] = {};
#pragma unroll
    for (int a = 0; a < kLoads; ++a) {
      float in[2][kElems], out[kElems];
#pragma unroll
      for (int i = 0; i < kReads; ++i) to_floats<T>(in[i], r_in[a][i]);
#pragma unroll
      for (int j = 0; j < kElems; ++j) {
        Cell<float> cell;
#pragma unroll
        for (int i = 0; i < kReads; ++i) cell.in[i] = in[i][j];
        cell.y = y;
        f(cell);
        sums[j & 1] += cell.to_row;
        if constexpr (F::kWrites) out[j] = cell.out;
      }
      if constexpr (F::kWrites) {
        store_access_if<T, kElems>(g_out, out, a * stride < left);
        g_out += step;
      }
    }
    sum += sums[0] + sums[1];
  }
  __shared__ BlockExchange<kMatrixRowTile.threads> s_exchange;
  const float total = s_exchange.sum_warps(warp_sum(sum.value()));
  if (threadIdx.x == 0) args.g_row_sums[row] = from_float<T>(total);
}

}  // namespace torchweld
