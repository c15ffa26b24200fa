// Launches a pass over a (rows, n) matrix (matrix_pass.cuh). Also launches the kernels of
// add_partials.cuh that add up the partial sums of rows and of columns.
#pragma once

#include "core/launch.h"
#include "device/dispatch.cuh"
#include "pointwise/matrix_pass.cuh"
#include "pointwise/matrix_rows.cuh"

namespace torchweld {

// Launches the kernel that adds up the partial sums (rows, parts) of each row.
template <typename T>
void launch_add_row_parts(const float* g_parts, int64_t rows, int64_t parts, T* g_sums,
                          cudaStream_t stream);

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
      if (args.g_row_parts != nullptr) {
        launch_add_row_parts(args.g_row_parts, plan.rows, plan.row_parts(), args.g_row_sums,
                             stream);
      }
    }
    if constexpr (F::kColumnSums) {
      if (args.g_column_parts != nullptr) {
        launch_add_partials<T>(args.g_column_parts, plan.column_parts(), 1, plan.n,
                               {{args.g_column_sums, nullptr}, 1}, stream);
      }
    }
  });
}

}  // namespace torchweld
