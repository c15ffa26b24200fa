// Launches the backward of scalar_attention. In the sweep that computes dq, threads own rows. In
// the sweep that computes dk and dv, threads own keys. puzzles/scalar_attention/sweep.cuh defines
// the sweeps.
#include "puzzles/scalar_attention/launch.cuh"

namespace torchweld {
namespace {

// Computes dq = dz / sum * sum_j e (v - mean) k.
template <typename T>
__global__ __launch_bounds__(kReduceThreads) void scalar_attention_reduce_query_kernel(
    const ScalarAttentionArgs args, int splits, T* g_dq) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kReduceThreads + threadIdx.x;
  if (i >= args.n) return;
  float r_sum[1];
  reduce_splits(r_sum, args.g_partials, splits, args.n, i);
  g_dq[i] = from_float<T>(args.g_dz[i] * (r_sum[0] / args.g_sum[i]));
}

template <typename T>
__global__ __launch_bounds__(kReduceThreads) void scalar_attention_reduce_key_kernel(
    const ScalarAttentionArgs args, int splits, T* g_dk, T* g_dv) {
  const int64_t j = static_cast<int64_t>(blockIdx.x) * kReduceThreads + threadIdx.x;
  if (j >= args.n) return;
  float r_sum[2];
  reduce_splits(r_sum, args.g_partials, splits, args.n, j);
  if (g_dk) g_dk[j] = from_float<T>(r_sum[0]);
  if (g_dv) g_dv[j] = from_float<T>(r_sum[1]);
}

}  // namespace

void launch_scalar_attention_backward(const ScalarAttentionBackwardParams& params,
                                      cudaStream_t stream) {
  const int64_t n = params.n;
  PrepareArgs prepare = {{params.k, params.v, params.q, params.dz}, 4, nullptr, nullptr, n};
  ScalarAttentionArgs args = launch_prepare(prepare, params.scratch, params.dtype, stream);
  args.g_dz = args.g_q + n;
  args.g_mean = params.mean;
  args.g_sum = params.sum;
  args.v_scale = 1.f;
  dispatch_dtype(params.dtype, [&](auto element) {
    using T = decltype(element);
    // Both sweeps use the same scratch memory. They run one after the other in the stream.
    if (params.dq) {
      const int splits = launch_sweep<QueryJob, kQuerySweep>(args, stream);
      launch_kernel(scalar_attention_reduce_query_kernel<T>, {reduce_blocks(n), kReduceThreads},
                    stream, args, splits, static_cast<T*>(params.dq));
    }
    if (params.dk || params.dv) {
      const int splits = launch_sweep<KeyJob, kKeySweep>(args, stream);
      launch_kernel(scalar_attention_reduce_key_kernel<T>, {reduce_blocks(n), kReduceThreads},
                    stream, args, splits, static_cast<T*>(params.dk), static_cast<T*>(params.dv));
    }
  });
  check_launch("scalar_attention_backward");
}

}  // namespace torchweld
