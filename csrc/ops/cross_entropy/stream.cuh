// A kernel of cross_entropy with one block per row. The block reads the row once for the statistics
// and a second time for the gradient. The second read hits the L2 cache, because the rows of all
// running blocks fit in the L2 cache.
#pragma once

#include "device/access.cuh"
#include "ops/cross_entropy/loss_row.cuh"
#include "softmax/parts.cuh"

namespace torchweld {

inline constexpr int kCrossEntropyThreads = 512, kCrossEntropyLoads = 4;

// Splits a row into three parts: `head` single elements before the first 16-byte boundary, then
// `accesses` accesses of 16 bytes, then `tail` single elements.
template <typename T>
struct RowSpan {
  static constexpr int kElems = kVectorBytes / sizeof(T);
  int64_t head, accesses, tail;

  __device__ __forceinline__ RowSpan(const T* g_row, int64_t n) {
    const int past = static_cast<int>(reinterpret_cast<uintptr_t>(g_row) % kVectorBytes);
    head = min(n, static_cast<int64_t>((kVectorBytes - past) % kVectorBytes / int{sizeof(T)}));
    accesses = (n - head) / kElems;
    tail = n - head - accesses * kElems;
  }

  // Calls each_access(column, words) for each 16-byte access of this thread, and
  // each_element(column, value) for each single element of this thread. Several loads are in flight
  // at the same time.
  template <typename EachAccess, typename EachElement>
  __device__ __forceinline__ void visit(const T* g_row, const EachAccess& each_access,
                                        const EachElement& each_element) const {
    const int64_t step = int64_t{blockDim.x} * kCrossEntropyLoads;
    for (int64_t first = threadIdx.x; first < accesses; first += step) {
      uint4 r_in[kCrossEntropyLoads];
#pragma unroll
      for (int i = 0; i < kCrossEntropyLoads; ++i) {
        const int64_t access = first + int64_t{i} * blockDim.x;
        r_in[i] = load_words_if(g_row + head + access * kElems, access < accesses);
      }
#pragma unroll
      for (int i = 0; i < kCrossEntropyLoads; ++i) {
        const int64_t access = first + int64_t{i} * blockDim.x;
        if (access < accesses) each_access(head + access * kElems, r_in[i]);
      }
    }
    if (threadIdx.x < head) each_element(threadIdx.x, to_float(g_row[threadIdx.x]));
    if (threadIdx.x < tail) {
      const int64_t column = n() - tail + threadIdx.x;
      each_element(column, to_float(g_row[column]));
    }
  }
  __device__ __forceinline__ int64_t n() const { return head + accesses * kElems + tail; }
};

template <typename T>
__global__ __launch_bounds__(kCrossEntropyThreads) void cross_entropy_stream_kernel(
    const CrossEntropyParams p, const int64_t first_row) {
  constexpr int kElems = kVectorBytes / sizeof(T);
  __shared__ BlockExchange<kCrossEntropyThreads> s_max_sum, s_total;
  __shared__ float s_max, s_log_sum;
  const int64_t row = first_row + blockIdx.x, target = p.targets[row];
  const T* g_row = static_cast<const T*>(p.logits) + row * p.row_stride;
  T* g_out = p.dlogits == nullptr ? nullptr : static_cast<T*>(p.dlogits) + row * p.n;
  const RowSpan<T> span(g_row, p.n);
  const bool in_phase = reinterpret_cast<uintptr_t>(g_row) % kVectorBytes ==
                        reinterpret_cast<uintptr_t>(g_out) % kVectorBytes;

  // Stores the gradients of one 16-byte access. If the row of the gradient has a different
  // alignment than the row of logits, the elements are stored one by one.
  const auto store = [&](int64_t column, const float (&r_d)[kElems]) {
    if (in_phase) {
      store_floats<T>(g_out + column, r_d);
    } else {
#pragma unroll
      for (int j = 0; j < kElems; ++j) g_out[column + j] = from_float<T>(r_d[j]);
    }
  };
  if (!has_target(p, target)) {
    if (g_out == nullptr) return;
    const RowSpan<T> out(g_out, p.n);
    for (int64_t i = threadIdx.x; i < out.accesses; i += blockDim.x) {
      store_vec(g_out + out.head + i * kElems, Vec<T, kElems>{});
    }
    const T zero = from_float<T>(0.f);
    if (threadIdx.x < out.head) g_out[threadIdx.x] = zero;
    if (threadIdx.x < out.tail) g_out[p.n - out.tail + threadIdx.x] = zero;
    return;
  }

  if (p.loss != nullptr) {
    const LossExponent<T> exponent;
    MaxSum local = {-INFINITY, 0.f};
    float total = 0.f;
    const float z_target = target_logit<T>(p, row, target), pivot = pivot_of(z_target);
    const auto add = [&](const auto& r_z) {
      const float max = fmaxf(local.max, largest(r_z));
      local = {max, rescaled_sum(local, max, exponent)};
      for (const float z : r_z) {
        local.sum += exponent(z, finite_max(max));
        total += z - pivot;
      }
    };
    span.visit(
        g_row,
        [&](int64_t, const uint4& words) {
          float r_z[kElems];
          to_floats<T>(r_z, words);
#pragma unroll
          for (float& z : r_z) z = scaled_logit(p, z);
          add(r_z);
        },
        [&](int64_t, float logit) {
          const float r_z[1] = {scaled_logit(p, logit)};
          add(r_z);
        });
    const MaxSum found = s_max_sum.merge_warps(warp_merge(local, exponent), exponent);
    if (p.terms.label_smoothing != 0.f) total = s_total.sum_warps(warp_sum(total));
    if (threadIdx.x == 0) {
      const auto statistics = row_statistics(p, found, total, z_target);
      p.loss[row] = p.terms.loss(statistics);
      p.max[row] = s_max = statistics.max;
      p.log_sum[row] = s_log_sum = statistics.log_sum;
    }
  } else if (threadIdx.x == 0) {
    s_max = p.max[row];
    s_log_sum = p.log_sum[row];
  }
  if (g_out == nullptr) return;
  __syncthreads();

  const RowGradient<float> gradient = row_gradient(p, row, s_max, s_log_sum);
  const auto gradient_of = [&](int64_t column, float logit) {
    const float z = scaled_logit(p, logit);
    float d;
    if (p.scale.softcap == 0.f) {
      d = (loss_exp<T>(z - gradient.shift) * gradient.scale + gradient.uniform) *
          p.inverse_temperature;
    } else {
      d = logit_gradient<T>(p, gradient, z);
    }
    return column == target ? d + gradient.target * p.scale.slope(z) : d;
  };
  span.visit(
      g_row,
      [&](int64_t column, const uint4& words) {
        float r_d[kElems];
        to_floats<T>(r_d, words);
#pragma unroll
        for (int j = 0; j < kElems; ++j) r_d[j] = gradient_of(column + j, r_d[j]);
        store(column, r_d);
      },
      [&](int64_t column, float logit) {
        g_out[column] = from_float<T>(gradient_of(column, logit));
      });
}

}  // namespace torchweld
