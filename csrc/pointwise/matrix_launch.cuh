// Launches a pass over a (rows, n) matrix (matrix_pass.cuh), and the kernels that add up the
// partial sums of rows and of columns in a fixed order.
#pragma once

#include "core/launch.h"
#include "device/dispatch.cuh"
#include "pointwise/matrix_pass.cuh"
#include "pointwise/matrix_rows.cuh"

namespace torchweld {

// Adds up the partial sums of each row. One warp processes a row. If a row has many partial sums, a
// whole block processes it.
template <typename T, int kThreadsPerRow, int kThreads>
__global__ __launch_bounds__(kThreads) void add_row_parts_kernel(const float* g_parts, int64_t rows,
                                                                 int64_t parts, T* g_sums) {
  constexpr int kRows = kThreads / kThreadsPerRow;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / kThreadsPerRow;
  if (kRows > 1 && row >= rows) return;
  const int thread = threadIdx.x % kThreadsPerRow;
  ColumnSumOf<T> part = {};
#pragma unroll 8
  for (int64_t i = thread; i < parts; i += kThreadsPerRow) part += g_parts[row * parts + i];
  float sum = warp_sum(part.value());
  if constexpr (kThreadsPerRow > kWarp) {
    __shared__ BlockExchange<kThreadsPerRow> s_exchange;
    sum = s_exchange.sum_warps(sum);
  }
  if (thread == 0) g_sums[row] = from_float<T>(sum);
}

template <typename T>
void launch_add_row_parts(const MatrixArgs<T>& args, cudaStream_t stream) {
  constexpr int64_t kManyParts = 512;
  constexpr int kRows = kMatrixThreads / kWarp, kManyThreads = 1024;
  const int64_t rows = args.plan.rows, parts = args.plan.row_parts();
  if (parts <= kManyParts) {
    launch_kernel(add_row_parts_kernel<T, kWarp, kMatrixThreads>,
                  {divide_up(rows, kRows), kMatrixThreads}, stream, args.g_row_parts, rows, parts,
                  args.g_row_sums);
  } else {
    launch_kernel(add_row_parts_kernel<T, kManyThreads, kManyThreads>, {rows, kManyThreads}, stream,
                  args.g_row_parts, rows, parts, args.g_row_sums);
  }
}

template <typename T>
void launch_add_column_parts(const MatrixArgs<T>& args, cudaStream_t stream) {
  const int64_t n = args.plan.n;
  const dim3 threads(kWarp, kPartialGroups);
  launch_kernel(add_partials_kernel<T>, {divide_up(n, kWarp), threads}, stream, args.g_column_parts,
                args.plan.column_parts(), 1, n, ColumnSums{{args.g_column_sums, nullptr}, 1});
}

template <int kElems, typename T, typename F>
void launch_matrix_kernel(const MatrixArgs<T>& args, const F& f, cudaStream_t stream) {
  const MatrixPlan& plan = args.plan;
  launch_kernel(matrix_pass_kernel<MatrixConfig<T, kElems, F>, F>,
                {plan.blocks(), static_cast<unsigned>(plan.groups * plan.lanes)}, stream, args, f);
}

template <typename T, typename F>
void launch_matrix_rows(const MatrixArgs<T>& args, const F& f, cudaStream_t stream) {
  const MatrixPlan& plan = args.plan;
  launch_kernel(matrix_rows_kernel<T, F>, {plan.blocks(), static_cast<unsigned>(plan.lanes)},
                stream, args, f);
}

template <typename F>
void launch_matrix_pass(const MatrixPassParams& p, const F& f, cudaStream_t stream) {
  const MatrixPlan plan = plan_matrix_pass(p);
  dispatch_dtype(p.dtype, [&](auto element) {
    using T = decltype(element);
    const MatrixArgs<T> args = {
        {static_cast<const T*>(p.in[0]), static_cast<const T*>(p.in[1])},
        {p.in_row_stride[0], p.in_row_stride[1]},
        static_cast<const T*>(p.x),
        static_cast<const T*>(p.y),
        static_cast<T*>(p.out),
        static_cast<T*>(p.row_sums),
        static_cast<T*>(p.column_sums),
        plan.row_scratch() > 0 ? p.scratch : nullptr,
        plan.column_scratch() > 0 ? p.scratch + plan.row_scratch() : nullptr,
        plan};
    if constexpr (takes_whole_rows<T, F>()) {
      if (plan.whole_rows) return launch_matrix_rows(args, f, stream);
    }
    if (plan.vector) {
      launch_matrix_kernel<16 / sizeof(T)>(args, f, stream);
    } else {
      launch_matrix_kernel<1>(args, f, stream);
    }
    if constexpr (F::kRowSums) {
      if (args.g_row_parts != nullptr) launch_add_row_parts(args, stream);
    }
    if constexpr (F::kColumnSums) {
      if (args.g_column_parts != nullptr) launch_add_column_parts(args, stream);
    }
  });
}

}  // namespace torchweld
