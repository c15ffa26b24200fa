// Launches scalar_attention and its backward. In the forward and in the sweep that computes dq,
// threads own rows. In the sweep that computes dk and dv, threads own keys.
// puzzles/scalar_attention/sweep.cuh defines the sweeps.
#include "puzzles/scalar_attention/launch.cuh"

namespace torchweld {
namespace {

// Computes z from the partials of the splits. v_scale is a power of two, so the division by it is
// exact.
template <typename T>
__global__ __launch_bounds__(kReduceThreads) void scalar_attention_reduce_kernel(
    const float* g_partials, int splits, int64_t n, float v_scale, T* g_z, float* g_mean,
    float* g_sum) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kReduceThreads + threadIdx.x;
  if (i >= n) return;
  float r_sum[2];
  reduce_splits(r_sum, g_partials, splits, n, i);
  const float mean = r_sum[1] / r_sum[0] / v_scale;
  g_z[i] = from_float<T>(mean);
  if (!g_mean) return;
  g_mean[i] = mean;
  g_sum[i] = r_sum[0];
}

int64_t partial_floats(ScalarAttentionSweep sweep, int64_t sums, int64_t n) {
  return sums * n * choose_scalar_attention(sweep, n, device_facts().sms).splits;
}

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

int64_t scalar_attention_scratch_floats(int64_t n, bool backward) {
  if (!backward) return kRangeFloats + 3 * n + partial_floats(kForwardSweep, 2, n);
  const int64_t rows = partial_floats(kQuerySweep, 1, n), keys = partial_floats(kKeySweep, 2, n);
  return kRangeFloats + 4 * n + (rows > keys ? rows : keys);
}

void launch_scalar_attention(const ScalarAttentionParams& params, cudaStream_t stream) {
  const int64_t n = params.n;
  PrepareArgs prepare = {{params.k, params.v, params.q}, 3, nullptr, nullptr, n};
  ScalarAttentionArgs args = launch_prepare(prepare, params.scratch, params.dtype, stream);
  args.v_scale = scalar_attention_value_scale(n);
  const int splits = launch_sweep<ForwardJob, kForwardSweep>(args, stream);
  dispatch_dtype(params.dtype, [&](auto element) {
    using T = decltype(element);
    launch_kernel(scalar_attention_reduce_kernel<T>, {reduce_blocks(n), kReduceThreads}, stream,
                  args.g_partials, splits, n, args.v_scale, static_cast<T*>(params.z), params.mean,
                  params.sum);
  });
  check_launch("scalar_attention");
}

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
