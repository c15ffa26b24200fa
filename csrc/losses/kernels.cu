// Kernels that process a chunk of rows of logits, with one block per row. One kernel computes the
// statistics of the row. Another kernel reads the row again and overwrites the logits with their
// gradient.
//
// NOTE: the kernels check the targets with assert, which NDEBUG would disable. The host does not
// check the targets, because it would have to wait for the GPU.
#undef NDEBUG
#include <cassert>

#include "core/launch.h"
#include "device/dispatch.cuh"
#include "device/reduce.cuh"
#include "losses/params.h"

namespace torchweld {
namespace {

constexpr int kThreads = 512, kElems = 4, kStep = kThreads * kElems, kWarps = kThreads / kWarp;

// The statistics of the logits that a thread has read so far. `sum` and `expected` are relative to
// `max`, the maximum of these logits. One loop over the row computes all statistics.
struct RunningRow {
  float max;
  float sum;       // the sum of e = exp(z - max)
  float expected;  // the sum of e * (z - max)
  float total;     // the sum of z - pivot, where pivot is the same for all logits of a row

  // NOTE: if the maximum is -inf, shift() returns 0, because z - max would be -inf - (-inf) = NaN.
  __device__ __forceinline__ float shift() const { return max == -INFINITY ? 0.f : max; }

  __device__ __forceinline__ void raise_to(float new_max) {
    if (!(new_max > max)) return;
    if (sum != 0.f) {
      const float down = max - new_max, factor = expf(down);
      // If `down` is -inf, the factor exp(down) is 0. The product 0 * sum is then 0, or NaN if the
      // sum is NaN.
      expected = factor == 0.f ? 0.f * sum : factor * (expected + sum * down);
      sum *= factor;
    }
    max = new_max;
  }
  __device__ __forceinline__ void add(float z, float pivot) {
    const float shifted = z - shift(), e = expf(shifted);
    sum += e;
    expected += e == 0.f ? 0.f : e * shifted;
    total += z - pivot;
  }
  __device__ __forceinline__ void merge(RunningRow other) {
    const float both = fmaxf(max, other.max);
    raise_to(both);
    other.raise_to(both);
    sum += other.sum;
    expected += other.expected;
    total += other.total;
  }
};

__device__ __forceinline__ RunningRow empty_row() { return {-INFINITY, 0.f, 0.f, 0.f}; }

__device__ __forceinline__ RunningRow shuffled(const RunningRow& x, int step) {
  RunningRow y;
  y.max = __shfl_xor_sync(~0u, x.max, step);
  y.sum = __shfl_xor_sync(~0u, x.sum, step);
  y.expected = __shfl_xor_sync(~0u, x.expected, step);
  y.total = __shfl_xor_sync(~0u, x.total, step);
  return y;
}

// Merges the statistics of all threads of the block. Every thread receives the result. The order of
// the merges is fixed, so the result has the same bits in every run.
__device__ __forceinline__ RunningRow merge_block(RunningRow x) {
  __shared__ RunningRow s_rows[kWarps];
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) x.merge(shuffled(x, step));
  if (threadIdx.x % kWarp == 0) s_rows[threadIdx.x / kWarp] = x;
  __syncthreads();
  RunningRow all = empty_row();
  for (int w = 0; w < kWarps; ++w) all.merge(s_rows[w]);
  return all;
}

template <typename T>
__device__ __forceinline__ float scaled_logit(const LossChunk& c, float logit, int64_t j) {
  if (c.bias != nullptr) logit += to_float(static_cast<const T*>(c.bias)[j]);
  if (c.scale.softcap != 0.f) logit = c.scale.softcap * tanhf(logit / c.scale.softcap);
  return c.scale.temperature == 1.f ? logit : logit / c.scale.temperature;
}

// Returns false if the row is ignored.
__device__ __forceinline__ bool has_target(const LossChunk& c, int64_t target) {
  if (c.ignores && target == c.ignore_index) return false;
  assert(target >= 0 && target < c.n && "torchweld: target must be from 0 to N - 1");
  return true;
}

template <typename T>
__global__ __launch_bounds__(kThreads) void loss_statistics_kernel(const LossChunk c) {
  const int64_t row = blockIdx.x, target = c.targets[row];
  if (!has_target(c, target)) return;
  const float* g_row = c.logits + row * c.row_stride;
  RunningRow running = empty_row();
  const float z_target = scaled_logit<T>(c, g_row[target], target), pivot = pivot_of(z_target);
  for (int64_t first = threadIdx.x * kElems; first < c.n; first += kStep) {
    const Vec<float, kElems> logits = load_vec<float, kElems>(g_row + first);
    float z[kElems], largest = -INFINITY;
#pragma unroll
    for (int i = 0; i < kElems; ++i) {
      if (first + i >= c.n) continue;
      z[i] = scaled_logit<T>(c, logits.values[i], first + i);
      largest = fmaxf(largest, z[i]);
    }
    running.raise_to(largest);
#pragma unroll
    for (int i = 0; i < kElems; ++i) {
      if (first + i < c.n) running.add(z[i], pivot);
    }
  }
  running = merge_block(running);
  if (threadIdx.x != 0) return;
  // If all logits of the row are -inf, lse is -inf and the other results are NaN, as in torch.
  const float max = running.max;
  const LogitStatistics<float> found = {max, logf(running.sum), z_target - max,
                                        running.total / static_cast<float>(c.n) + (pivot - max),
                                        running.expected / running.sum};
  c.loss[row] = c.cross_entropy ? c.terms.loss(found) : found.logprob();
  c.lse[row] = found.lse();
  if (c.entropy != nullptr) c.entropy[row] = found.entropy();
  if (c.mean != nullptr) c.mean[row] = found.row_mean();
}

template <typename T>
__global__ __launch_bounds__(kThreads) void loss_gradient_kernel(const LossGradientParams p) {
  const LossChunk& c = p.chunk;
  const int64_t row = blockIdx.x, target = c.targets[row];
  float* g_row = c.logits + row * c.row_stride;
  T* g_out = reinterpret_cast<T*>(g_row);
  const bool live = has_target(c, target);
  RowGradient<float> gradient = {};
  if (live) {
    const float d = p.dloss[row * p.dloss_stride], lse = c.lse[row];
    if (c.cross_entropy) {
      gradient =
          RowGradient<float>::of_loss(d, lse, c.terms, c.n, p.dlse == nullptr ? 0.f : p.dlse[row],
                                      p.dmean == nullptr ? 0.f : p.dmean[row]);
    } else {
      const bool entropy = p.dentropy != nullptr;
      gradient = RowGradient<float>::of_logprob(d, entropy ? p.dentropy[row] : 0.f, lse,
                                                entropy ? c.entropy[row] : 0.f);
    }
  }
  // Every thread of the block must run every iteration, because the loop contains a barrier.
  for (int64_t begin = 0; begin < c.n; begin += kStep) {
    const int64_t first = begin + threadIdx.x * kElems;
    Vec<float, kElems> logits = {};
    if (live && first < c.n) logits = load_vec<float, kElems>(g_row + first);
    // NOTE: a 16-bit gradient has half the bytes of an fp32 logit. The gradients of this iteration
    // thus overwrite logits of this iteration or of earlier iterations. Therefore all threads must
    // have loaded their logits before any thread stores gradients.
    if constexpr (sizeof(T) != sizeof(float)) __syncthreads();
    if (first >= c.n) continue;
    Vec<T, kElems> out;
#pragma unroll
    for (int i = 0; i < kElems; ++i) {
      const int64_t j = first + i;
      float d = 0.f;
      if (live && j < c.n) {
        const float z = scaled_logit<T>(c, logits.values[i], j);
        d = gradient.of_logit(z, expf(z - gradient.shift), c.scale);
        if (j == target) d += gradient.target * c.scale.slope(z);
      }
      out.values[i] = from_float<T>(d);
    }
    store_vec(g_out + first, out);
  }
}

template <typename T, int kWidth>
__global__ __launch_bounds__(kThreads) void loss_scale_kernel(const LossScaleParams p) {
  const T* g_x = static_cast<const T*>(p.x);
  T* g_y = static_cast<T*>(p.y);
  const float factor = *p.factor;
  if (g_x == g_y && factor == 1.f) return;
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t step = int64_t{gridDim.x} * kThreads, whole = p.size / kWidth * kWidth;
  for (int64_t i = thread * kWidth; i < whole; i += step * kWidth) {
    Vec<T, kWidth> values = load_vec<T, kWidth>(g_x + i);
#pragma unroll
    for (T& value : values.values) value = from_float<T>(to_float(value) * factor);
    store_vec(g_y + i, values);
  }
  if (thread < p.size - whole) {
    g_y[whole + thread] = from_float<T>(to_float(g_x[whole + thread]) * factor);
  }
}

}  // namespace

void launch_loss_statistics(const LossChunk& chunk, cudaStream_t stream) {
  dispatch_dtype(chunk.dtype, [&](auto element) {
    launch_kernel(loss_statistics_kernel<decltype(element)>, Grid(chunk.rows, kThreads), stream,
                  chunk);
  });
  check_launch("loss_statistics");
}

void launch_loss_gradient(const LossGradientParams& params, cudaStream_t stream) {
  dispatch_dtype(params.chunk.dtype, [&](auto element) {
    launch_kernel(loss_gradient_kernel<decltype(element)>, Grid(params.chunk.rows, kThreads),
                  stream, params);
  });
  check_launch("loss_gradient");
}

void launch_loss_scale(const LossScaleParams& params, cudaStream_t stream) {
  constexpr int64_t kMaxBlocks = 1 << 12;
  const bool aligned = rows_aligned(params.x) && rows_aligned(params.y);
  dispatch_dtype(params.dtype, [&](auto element) {
    using T = decltype(element);
    constexpr int kVector = kVectorBytes / sizeof(T);
    const int64_t width = aligned ? kVector : 1;
    const int64_t blocks = params.size / (kThreads * width) + 1;
    const Grid grid(blocks < kMaxBlocks ? blocks : kMaxBlocks, kThreads);
    const auto kernel = aligned ? loss_scale_kernel<T, kVector> : loss_scale_kernel<T, 1>;
    launch_kernel(kernel, grid, stream, params);
  });
  check_launch("loss_scale");
}

}  // namespace torchweld
