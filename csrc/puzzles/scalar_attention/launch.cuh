// Launch functions for both the forward and the backward of scalar_attention.
#pragma once

#include "core/device.h"
#include "core/launch.h"
#include "device/dispatch.cuh"
#include "puzzles/scalar_attention/jobs.cuh"
#include "puzzles/scalar_attention/scalar_attention.h"

namespace torchweld {

constexpr int kMaxVectors = 4;
constexpr int kPrepareThreads = 1024;
constexpr int kReduceThreads = 256;

// The vectors of a call. The first vector holds the keys.
struct PrepareArgs {
  ScalarAttentionVector from[kMaxVectors];
  int count;
  float* g_to;  // (count, n)
  KeyRange* g_keys;
  int64_t n;
};

// Converts every vector to fp32 with stride 1 and computes the range of the keys. One block
// suffices, because the work of this kernel is linear in n and the work of the sweeps is quadratic.
template <typename T>
__global__ __launch_bounds__(kPrepareThreads) void scalar_attention_prepare_kernel(
    const PrepareArgs args) {
  __shared__ KeyRange s_range[kPrepareThreads / kWarp];
#pragma unroll
  for (int vector = 1; vector < kMaxVectors; ++vector) {
    if (vector >= args.count) break;
    const T* g_from = static_cast<const T*>(args.from[vector].data);
    const int64_t stride = args.from[vector].stride;
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < args.n; i += kPrepareThreads) {
      args.g_to[vector * args.n + i] = to_float(g_from[i * stride]);
    }
  }
  // max(k) is computed as -min(-k), because the minimum propagates NaN.
  float min = INFINITY, min_negative = INFINITY;
  const T* g_keys = static_cast<const T*>(args.from[0].data);
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < args.n; i += kPrepareThreads) {
    const float k = to_float(g_keys[i * args.from[0].stride]);
    args.g_to[i] = k;
    min = min_or_nan(min, k);
    min_negative = min_or_nan(min_negative, -k);
  }
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    min = min_or_nan(min, __shfl_xor_sync(~0u, min, step));
    min_negative = min_or_nan(min_negative, __shfl_xor_sync(~0u, min_negative, step));
  }
  if (threadIdx.x % kWarp == 0) s_range[threadIdx.x / kWarp] = {min, min_negative};
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kPrepareThreads / kWarp; ++w) {
    min = min_or_nan(min, s_range[w].min);
    min_negative = min_or_nan(min_negative, s_range[w].max);
  }
  *args.g_keys = {min, -min_negative};
}

// The number of floats of scratch memory for the range of the keys. The scratch memory holds this
// range, the vectors, and the partials of the splits, in this order.
constexpr int64_t kRangeFloats = 4;

// Copies the vectors (k, v, q, then others) to the scratch memory and returns the arguments of the
// sweeps.
inline ScalarAttentionArgs launch_prepare(PrepareArgs prepare, float* scratch, DType dtype,
                                          cudaStream_t stream) {
  const int64_t n = prepare.n;
  prepare.g_keys = reinterpret_cast<KeyRange*>(scratch);
  prepare.g_to = scratch + kRangeFloats;
  dispatch_dtype(dtype, [&](auto element) {
    launch_kernel(scalar_attention_prepare_kernel<decltype(element)>, {1, kPrepareThreads}, stream,
                  prepare);
  });
  ScalarAttentionArgs args = {};
  args.g_keys = prepare.g_keys;
  args.g_k = prepare.g_to;
  args.g_v = prepare.g_to + n;
  args.g_q = prepare.g_to + 2 * n;
  args.g_partials = prepare.g_to + prepare.count * n;
  args.n = n;
  return args;
}

template <typename Job>
void launch_sweep_tile(const ScalarAttentionArgs& args, int64_t blocks, cudaStream_t stream) {
  launch_kernel(scalar_attention_sweep_kernel<Job>, {blocks, kScalarAttentionThreads}, stream,
                args);
}

// Launches a sweep with the tile chosen for n and returns the number of splits.
template <template <int> typename Job, ScalarAttentionSweep kSweep>
int launch_sweep(ScalarAttentionArgs args, cudaStream_t stream) {
  static_assert(kNumScalarAttentionTiles == 2);
  const ScalarAttentionChoice choice = choose_scalar_attention(kSweep, args.n, device_facts().sms);
  const int64_t owners = static_cast<int64_t>(kScalarAttentionTiles[kSweep][choice.tile].owners) *
                         kScalarAttentionThreads;
  args.per_split = choice.per_split;
  args.owner_blocks = (args.n + owners - 1) / owners;
  const int64_t blocks = args.owner_blocks * choice.splits;
  if (choice.tile == 0) {
    launch_sweep_tile<Job<0>>(args, blocks, stream);
  } else {
    launch_sweep_tile<Job<1>>(args, blocks, stream);
  }
  return choice.splits;
}

inline int64_t reduce_blocks(int64_t n) { return (n + kReduceThreads - 1) / kReduceThreads; }

}  // namespace torchweld
