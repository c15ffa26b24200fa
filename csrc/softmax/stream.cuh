// Row softmax and its backward for rows that are held neither in registers nor in shared memory.
// Each row has one block, which reads the row twice. The first read computes a running (max, sum)
// per thread. The second read computes and stores the result.
#pragma once

#include "softmax/config.h"
#include "softmax/parts.cuh"

namespace torchweld {

// kElems is the number of elements in an access. An access is 16 bytes or one element.
template <typename T, int kElems, typename Mask>
__global__ __launch_bounds__(kSoftmaxStreamThreads) void softmax_stream_kernel(
    const RowArgs<T> args, const Mask mask) {
  constexpr int kStep = kSoftmaxStreamThreads * kElems;
  __shared__ BlockExchange<kSoftmaxStreamThreads> s_exchange;

  const auto exponent = exponent_of<T>(mask);
  const int64_t row = blockIdx.x;
  const KeyRange live = mask.live(args.first_row + row);
  const T* g_x = args.g_x + row * args.x_row_stride;
  T* g_y = args.g_y + row * args.n;
  const int64_t start = live.begin / kElems * kElems + threadIdx.x * kElems;

  // First read: compute a running (max, sum) per thread.
  MaxSum local = {-INFINITY, 0.f};
  for (int64_t first = start; first < live.end; first += kStep) {
    float r_x[kElems];
    unpack_scores<Mask>(r_x, load_vec<T, kElems>(g_x + first), live, first, exponent);
    accumulate(local, largest(r_x), r_x, exponent);
  }
  const MaxSum total = s_exchange.merge_warps(warp_merge(local, exponent), exponent);
  float factor = 1.f / total.sum, shift = total.max;
  if constexpr (Mask::kCapped) {
    const float sink = mask.sink(args.first_row + row);
    factor = exponent.finish(total, sink).factor;
    if (sink > total.max) shift = finite_max(shift);
  }

  // Second read: compute and store the result.
  for (int64_t first = threadIdx.x * kElems; first < args.n; first += kStep) {
    Vec<T, kElems> out = {};
    if (touches<Mask>(live, first, kElems)) {
      float r_x[kElems];
      unpack_scores<Mask>(r_x, load_vec<T, kElems>(g_x + first), live, first, exponent);
#pragma unroll
      for (int j = 0; j < kElems; ++j) {
        out.values[j] = from_float<T>(exponent(r_x[j], shift) * factor);
      }
      if constexpr (Mask::kMasked) {
        if (!isfinite(factor) || !isfinite(shift)) clear_hidden(out, live, first);
      }
    }
    store_vec(g_y + first, out);
  }
}

template <typename T, int kElems, typename Mask>
__global__ __launch_bounds__(kSoftmaxStreamThreads) void softmax_backward_stream_kernel(
    const RowArgs<T> args, const Mask mask) {
  constexpr int kStep = kSoftmaxStreamThreads * kElems;
  __shared__ BlockExchange<kSoftmaxStreamThreads> s_exchange;

  const int64_t row = blockIdx.x;
  const KeyRange live = mask.live(args.first_row + row);
  const T* g_y = args.g_x + row * args.x_row_stride;
  const T* g_dy = args.g_dy + row * args.dy_row_stride;
  T* g_dx = args.g_y + row * args.n;

  float dot = 0.f;
  const int64_t start = live.begin / kElems * kElems + threadIdx.x * kElems;
  for (int64_t first = start; first < live.end; first += kStep) {
    float y[kElems], dy[kElems];
    unpack<Mask>(y, load_vec<T, kElems>(g_y + first), live, first, 1.f, 0.f);
    unpack<Mask>(dy, load_vec<T, kElems>(g_dy + first), live, first, 1.f, 0.f);
#pragma unroll
    for (int j = 0; j < kElems; ++j) dot += y[j] * dy[j];
  }
  dot = s_exchange.sum_warps(warp_sum(dot));

  for (int64_t first = threadIdx.x * kElems; first < args.n; first += kStep) {
    Vec<T, kElems> out = {};
    if (touches<Mask>(live, first, kElems)) {
      float y[kElems], dy[kElems];
      unpack<Mask>(y, load_vec<T, kElems>(g_y + first), live, first, mask.scale(), 0.f);
      unpack<Mask>(dy, load_vec<T, kElems>(g_dy + first), live, first, 1.f, 0.f);
#pragma unroll
      for (int j = 0; j < kElems; ++j) out.values[j] = from_float<T>(y[j] * (dy[j] - dot));
      if constexpr (Mask::kMasked) {
        if (!isfinite(dot)) clear_hidden(out, live, first);
      }
    }
    store_vec(g_dx + first, out);
  }
}

}  // namespace torchweld
