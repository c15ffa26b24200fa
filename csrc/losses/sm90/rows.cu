// The per-row kernels that run before and after the matmul whose epilogue computes exponentials.
// Before the matmul, a kernel computes the logits of the targets. After the matmul, kernels compute
// the losses. They also rescale y, so that factor * y is the gradient with respect to the logits.
//
// NOTE: the kernels check the targets with assert, which NDEBUG would disable. The host does not
// check the targets, because it would have to wait for the GPU.
#undef NDEBUG
#include <cassert>

#include "core/launch.h"
#include "device/reduce.cuh"
#include "device/vec.cuh"
#include "losses/sm90/exponentials.h"
#include "losses/sm90/rows.h"
#include "losses/sm90/softcap.cuh"

namespace torchweld {
namespace {

using T = __nv_bfloat16;
constexpr int kThreads = 256, kWarps = kThreads / kWarp, kElems = kVectorBytes / sizeof(T);

__global__ void __launch_bounds__(kThreads) target_logits_kernel(ExponentialRows p) {
  const int64_t row = int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  if (row >= p.rows) return;
  const int64_t target = p.target[row];
  if (target == p.ignore_index) {
    if (lane == 0) {
      p.target_logit[row] = 0;
      p.reference[row] = INFINITY;
    }
    return;
  }
  assert(target >= 0 && target < p.n && "torchweld: target must be from 0 to N - 1");
  const T* g_x = static_cast<const T*>(p.x) + row * p.x_row_stride;
  const T* g_w = static_cast<const T*>(p.weight) + target * p.weight_row_stride;
  float sum = 0, mean = 0;
  for (int64_t k = lane * kElems; k < p.k; k += kWarp * kElems) {
    float x[kElems], w[kElems];
    to_floats<T>(x, load_words(g_x + k));
    to_floats<T>(w, load_words(g_w + k));
#pragma unroll
    for (int j = 0; j < kElems; ++j) sum = fmaf(x[j], w[j], sum);
    if (p.mean_weight == nullptr) continue;
#pragma unroll
    for (int j = 0; j < kElems; ++j) mean = fmaf(x[j], p.mean_weight[k + j], mean);
  }
  sum = warp_sum(sum);
  mean = warp_sum(mean);
  if (lane != 0) return;
  if (p.mean_weight != nullptr) {
    if (p.mean_bias != nullptr) mean += *p.mean_bias;
    p.mean_logit[row] = mean / p.temperature;
  }
  if (p.bias != nullptr) sum += to_float(static_cast<const T*>(p.bias)[target]);
  if (p.softcap > 0) sum = capped_logit(sum, p.softcap, 1.f / p.softcap);
  sum /= p.temperature;
  p.target_logit[row] = sum;
  const float l = sum * kLog2e;
  p.reference[row] = fabsf(l) < INFINITY ? rintf(l) + kAboveTarget : NAN;
}

// Running sums over columns. `sum` is the sum of 2^(l - reference), and `moment` is the sum of
// 2^(l - reference) * (l - reference + kAboveTarget). add() adds the sums of other columns. It
// rescales both operands to the larger of their two references.
struct ExponentialSums {
  float reference = -INFINITY, sum = 0;
  double moment = 0;

  __device__ __forceinline__ void add(const ExponentialSums& other) {
    if (other.sum == 0) return;
    const float max = fmaxf(reference, other.reference);
    if (sum == 0) {
      *this = other;
      return;
    }
    const float down = other.reference == max ? 0.f : other.reference - max,
                own_down = reference == max ? 0.f : reference - max;
    const float factor = exp2f(down), own_factor = exp2f(own_down);
    moment = own_factor * (double(own_down) * sum + moment) +
             factor * (double(down) * other.sum + other.moment);
    sum = own_factor * sum + factor * other.sum;
    reference = max;
  }
};

// Returns 1 + 2 z_loss lse, the derivative of the loss with respect to the lse. If the derivative
// is nearly 0, returns kTiny instead, because the caller divides by the result.
__device__ __forceinline__ float lse_slope(float z_loss, float lse) {
  constexpr float kTiny = 1e-10f;
  const float slope = fmaf(2.f * z_loss, lse, 1.f);
  return fabsf(slope) < kTiny ? kTiny : slope;
}

// The number of rows per block (kRows), and the number of threads per row (kGroups).
constexpr int kRows = 32, kGroups = 8;

__global__ void __launch_bounds__(kRows* kGroups)
    exponential_rows_kernel(ExponentialRows p, TileSums tiles, ExponentialResults out) {
  __shared__ ExponentialSums s_sums[kGroups][kRows];
  __shared__ bool s_differs[kGroups][kRows];
  const int lane = threadIdx.x % kRows, group = threadIdx.x / kRows;
  const int64_t row = int64_t(blockIdx.x) * kRows + lane;
  ExponentialSums sums;
  bool differs = false;
  if (row < p.rows) {
    if (!tiles.first && group == 0) {
      sums = {out.row_reference[row], out.row_sum[row], out.row_moment[row]};
    }
    const float expected = p.reference[row];
#pragma unroll 4
    for (int64_t tile = group; tile < tiles.tiles; tile += kGroups) {
      const int64_t at = tile * p.rows + row;
      const ExponentialSums of_tile = {tiles.reference[at], tiles.sum[at],
                                       tiles.moment != nullptr ? tiles.moment[at] : 0.f};
      differs |= of_tile.sum != 0 && of_tile.reference != expected;
      sums.add(of_tile);
    }
  }
  s_sums[group][lane] = sums;
  s_differs[group][lane] = differs;
  __syncthreads();
  if (group != 0 || row >= p.rows) return;
  for (int i = 1; i < kGroups; ++i) {
    sums.add(s_sums[i][lane]);
    differs |= s_differs[i][lane];
  }
  out.row_reference[row] = sums.reference;
  out.row_sum[row] = sums.sum;
  out.row_moment[row] = float(sums.moment);
  if (!tiles.last) return;
  if (p.reference[row] == INFINITY) {
    out.loss[row] = out.lse[row] = 0;
    if (out.entropy != nullptr) out.entropy[row] = 0;
    if (out.y != nullptr) out.factor[row] = 0;
    return;
  }
  constexpr double kLn2 = 0.69314718055994531;
  const double log_sum = log(double(sums.sum));
  const double lse = log_sum + (sums.sum == 0 ? 0 : kLn2 * sums.reference);
  out.lse[row] = float(lse);
  // NOTE: if label_smoothing is 0, the mean is not added, because 0 times a mean of -inf is NaN.
  const double eps = p.label_smoothing;
  double expected = (1 - eps) * p.target_logit[row];
  if (eps != 0) expected += eps * p.mean_logit[row];
  out.loss[row] = float(lse - expected + p.z_loss * lse * lse);
  // The entropy is lse - sum(p z). The code uses lse and z relative to the reference, because the
  // reference cancels in the difference.
  if (out.entropy != nullptr) {
    const double expectation = sums.moment / sums.sum - kAboveTarget;
    out.entropy[row] = float(log_sum - kLn2 * expectation);
  }
  if (out.y == nullptr) return;
  out.factor[row] = lse_slope(p.z_loss, float(lse)) / (sums.sum * p.temperature);
  // A NaN tells finish_exponentials_kernel that it need not rescale the row, because all tiles of
  // the row have the same reference.
  if (!differs) out.row_reference[row] = NAN;
}

// If y contains the column of the row's target, sets y in this column. The new y is such that
// factor * y is (lse_slope * p - share) / temperature. If there is a softcap, factor * y is this
// value times 1 - tanh^2. p is the probability of the target.
__device__ __forceinline__ void store_target_term(const ExponentialRows& p,
                                                  const ExponentialResults& out, int64_t row) {
  const int64_t target = p.target[row], column = target - out.first_column;
  if (target == p.ignore_index || column < 0 || column >= p.n) return;
  const float z = p.target_logit[row], probability = expf(z - out.lse[row]);
  const float slope = lse_slope(p.z_loss, out.lse[row]);
  const float share =
      (1.f - p.label_smoothing) * (out.target_share == nullptr ? 1.f : out.target_share[row]);
  float y = fmaf(slope, probability, -share) * (out.row_sum[row] / slope);
  if (p.softcap > 0) {
    const float t = z * p.temperature / p.softcap;
    y *= fmaf(-t, t, 1.f);
  }
  static_cast<T*>(out.y)[row * out.y_row_stride + column] = from_float<T>(y);
}

// Each block processes one row. It rescales y in the tiles whose reference differs from the row's
// reference. Then it sets y at the target.
__global__ void __launch_bounds__(128)
    finish_exponentials_kernel(ExponentialRows p, TileSums tiles, ExponentialResults out) {
  const int64_t row = blockIdx.x;
  const float reference = out.row_reference[row];
  if (!isnan(reference)) {
    T* g_y = static_cast<T*>(out.y) + row * out.y_row_stride;
    for (int64_t tile = 0; tile < tiles.tiles; ++tile) {
      const int64_t at = tile * p.rows + row;
      const float k = tiles.reference[at];
      if (k == reference || tiles.sum[at] == 0) continue;
      const float factor = exp2f(k - reference);
      const int64_t first = tile * tiles.tile_columns;
      for (int64_t j = first + threadIdx.x; j < min(p.n, first + tiles.tile_columns);
           j += blockDim.x) {
        g_y[j] = from_float<T>(to_float(g_y[j]) * factor);
      }
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) store_target_term(p, out, row);
}

__device__ __forceinline__ int64_t row_of_thread() {
  return int64_t(blockIdx.x) * kThreads + threadIdx.x;
}

__global__ void __launch_bounds__(kThreads)
    gradient_factors_kernel(ExponentialRows p, ExponentialResults out) {
  const int64_t row = row_of_thread();
  if (row >= p.rows) return;
  if (p.target[row] == p.ignore_index) {
    out.row_reference[row] = INFINITY;
    out.factor[row] = 0;
    return;
  }
  const float lse = out.lse[row], exponent = lse * kLog2e;
  const float reference = fabsf(exponent) < INFINITY ? rintf(exponent) : 0.f;
  out.row_reference[row] = reference;
  out.row_sum[row] = exp2f(fmaf(lse, kLog2e, -reference));
  out.factor[row] = lse_slope(p.z_loss, lse) / (out.row_sum[row] * p.temperature);
}

__global__ void __launch_bounds__(kThreads)
    gradient_targets_kernel(ExponentialRows p, ExponentialResults out) {
  const int64_t row = row_of_thread();
  if (row < p.rows) store_target_term(p, out, row);
}

template <typename From>
__global__ void __launch_bounds__(kThreads) scale_rows_kernel(ScaledRows p) {
  const int64_t row = blockIdx.x;
  float factor = p.factor[row], row_offset = 0;
  if (factor != 0) {
    factor *= p.scale[row * p.scale_stride];
    if (p.row_offset != nullptr) row_offset = p.row_offset[row];
  }
  const From* g_from = static_cast<const From*>(p.from) + row * p.from_row_stride;
  T* g_to = static_cast<T*>(p.to) + row * p.to_row_stride;
  for (int64_t j = threadIdx.x * kElems; j < p.columns; j += kThreads * kElems) {
    float v[kElems];
    if constexpr (sizeof(From) == sizeof(float)) {
      const Vec<float, kElems> values = load_vec<float, kElems>(g_from + j);
#pragma unroll
      for (int i = 0; i < kElems; ++i) v[i] = values.values[i];
    } else {
      to_floats<T>(v, load_words(g_from + j));
    }
#pragma unroll
    for (int i = 0; i < kElems; ++i) v[i] = factor == 0 ? 0.f : v[i] * factor;
    if (row_offset != 0) {
#pragma unroll
      for (int i = 0; i < kElems; ++i) v[i] = fmaf(row_offset, p.offset[j + i], v[i]);
    }
    *reinterpret_cast<uint4*>(g_to + j) = words_of<T>(v);
  }
}

}  // namespace

void launch_target_logits(const ExponentialRows& p, cudaStream_t stream) {
  launch_kernel(target_logits_kernel, Grid((p.rows + kWarps - 1) / kWarps, kThreads), stream, p);
  check_launch("target_logits");
}

void launch_exponential_rows(const ExponentialRows& p, const TileSums& tiles,
                             const ExponentialResults& out, cudaStream_t stream) {
  launch_kernel(exponential_rows_kernel, Grid((p.rows + kRows - 1) / kRows, kRows * kGroups),
                stream, p, tiles, out);
  if (out.y != nullptr && tiles.last) {
    launch_kernel(finish_exponentials_kernel, Grid(p.rows, 128), stream, p, tiles, out);
  }
  check_launch("exponential_rows");
}

void launch_gradient_factors(const ExponentialRows& p, const ExponentialResults& out,
                             cudaStream_t stream) {
  launch_kernel(gradient_factors_kernel, Grid((p.rows + kThreads - 1) / kThreads, kThreads), stream,
                p, out);
  check_launch("gradient_factors");
}

void launch_gradient_targets(const ExponentialRows& p, const ExponentialResults& out,
                             cudaStream_t stream) {
  launch_kernel(gradient_targets_kernel, Grid((p.rows + kThreads - 1) / kThreads, kThreads), stream,
                p, out);
  check_launch("gradient_targets");
}

void launch_scale_rows(const ScaledRows& p, cudaStream_t stream) {
  const auto kernel = p.from_fp32 ? scale_rows_kernel<float> : scale_rows_kernel<T>;
  launch_kernel(kernel, Grid(p.rows, kThreads), stream, p);
  check_launch("scale_rows");
}

}  // namespace torchweld
