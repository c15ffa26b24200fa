// The kernel of fold_layer_norm. Each block computes one row of the folded weight and reads the row
// of the weight once.
#include "core/launch.h"
#include "device/dispatch.cuh"
#include "device/reduce.cuh"
#include "ops/folded_layer_norm_linear/folded_linear.h"

namespace torchweld {
namespace {

constexpr int kFoldThreads = 128;

template <typename T>
__global__ __launch_bounds__(kFoldThreads) void fold_layer_norm_kernel(const FoldParams p) {
  __shared__ PairExchange<kFoldThreads> s_exchange;
  const T* g_ln_weight = static_cast<const T*>(p.ln_weight);
  const T* g_ln_bias = static_cast<const T*>(p.ln_bias);
  const int64_t row = blockIdx.x;
  const T* g_weight = static_cast<const T*>(p.weight) + row * p.weight_row_stride;
  T* g_folded = static_cast<T*>(p.folded_weight) + row * p.k;

  // sums.x is the sum of the products weight * ln_weight. Each product is first rounded to T,
  // because weight_sum must be the exact row sum of the rounded weight that the matmul reads.
  float2 sums = make_float2(0.f, 0.f);
#pragma unroll 2
  for (int64_t column = threadIdx.x; column < p.k; column += kFoldThreads) {
    const float weight = to_float(g_weight[column * p.weight_column_stride]);
    const T folded =
        from_float<T>(g_ln_weight != nullptr ? weight * to_float(g_ln_weight[column]) : weight);
    g_folded[column] = folded;
    sums.x += to_float(folded);
    if (g_ln_bias != nullptr) sums.y += weight * to_float(g_ln_bias[column]);
  }
  sums = s_exchange.sum_warps(warp_sum(sums));
  if (threadIdx.x != 0) return;
  p.weight_sum[row] = sums.x;
  p.folded_bias[row] =
      p.bias != nullptr ? to_float(static_cast<const T*>(p.bias)[row]) + sums.y : sums.y;
}

}  // namespace

void launch_fold_layer_norm(const FoldParams& params, cudaStream_t stream) {
  dispatch_dtype(params.dtype, [&](auto element) {
    using T = decltype(element);
    launch_kernel(fold_layer_norm_kernel<T>, {params.n, kFoldThreads}, stream, params);
  });
  check_launch("fold_layer_norm");
}

}  // namespace torchweld
