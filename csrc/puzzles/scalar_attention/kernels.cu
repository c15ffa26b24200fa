// Launches the forward of scalar_attention. The sweep is in puzzles/scalar_attention/sweep.cuh.
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

}  // namespace torchweld
