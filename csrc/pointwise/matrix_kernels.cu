// Launches the passes over a (rows, n) matrix. The kernel of a pass is in matrix_pass.cuh.
#include "core/launch.h"
#include "device/dispatch.cuh"
#include "pointwise/matrix_cells.h"
#include "pointwise/matrix_pass.cuh"

namespace torchweld {
namespace {

// Adds up the partial sums (rows, parts) of each row. If a row has few partial sums, one warp adds
// them up. If a row has many, a whole block adds them up.
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
void add_row_parts(const MatrixPassParams& p, int64_t parts, cudaStream_t stream) {
  constexpr int64_t kManyParts = 512;
  constexpr int kThreads = 256, kManyThreads = 1024;
  const bool many = parts > kManyParts;
  const auto kernel = many ? add_row_parts_kernel<T, kManyThreads, kManyThreads>
                           : add_row_parts_kernel<T, kWarp, kThreads>;
  const Grid grid =
      many ? Grid(p.rows, kManyThreads) : Grid(divide_up(p.rows, kThreads / kWarp), kThreads);
  launch_kernel(kernel, grid, stream, p.scratch, p.rows, parts, static_cast<T*>(p.row_sums));
}

}  // namespace

template <typename F>
void launch_matrix_pass(const MatrixPassParams& p, const F& f, cudaStream_t stream) {
  const MatrixPlan plan = plan_matrix_pass(p);
  dispatch_dtype(p.dtype, [&](auto element) {
    using T = decltype(element);
    const auto kernel =
        plan.vector ? matrix_pass_kernel<T, 16 / sizeof(T), F> : matrix_pass_kernel<T, 1, F>;
    launch_kernel(kernel, {plan.blocks(), static_cast<unsigned>(plan.groups * plan.lanes)}, stream,
                  MatrixArgs{p, plan}, f);
    if constexpr (F::kRowSums) {
      if (plan.row_parts() > 1) add_row_parts<T>(p, plan.row_parts(), stream);
    }
    if constexpr (F::kColumnSums) {
      if (plan.column_parts() > 1) {
        launch_add_partials<T>(p.scratch + plan.row_scratch(), plan.column_parts(), 1, plan.n,
                               {{p.column_sums, nullptr}, 1}, stream);
      }
    }
  });
  check_launch(F::kName);
}

#define TW_MATRIX_PASS(Cell) \
  template void launch_matrix_pass(const MatrixPassParams&, const Cell&, cudaStream_t)
TW_MATRIX_PASS(AddScalarCell);
TW_MATRIX_PASS(OuterAddCell);
TW_MATRIX_PASS(OuterAddBackwardCell);
TW_MATRIX_PASS(OuterMulReluCell);
TW_MATRIX_PASS(OuterMulReluBackwardCell);
TW_MATRIX_PASS(MulReluCell);
TW_MATRIX_PASS(MulReluBackwardCell);
#undef TW_MATRIX_PASS

}  // namespace torchweld
