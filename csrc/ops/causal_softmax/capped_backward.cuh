// The backward of causal_softmax with softcap or a sink:
//   dx = scale * y * (dy - sum(dy * y)) * (1 - tanh(scale * x / softcap)^2) over the live columns
//   sink_terms = -p_sink * sum(dy * y) for each row; p_sink is the softmax probability of the sink
//
// A block computes one row. It has at most one thread for each 16-byte access of the row. The block
// reads the row twice. The first read computes sum(dy * y). With a sink, it also computes the
// maximum of the row's scores and the sum of their exponentials. The second read computes dx. For
// rows of usual length, the second read hits the cache.
// Source: see softmax/stream.cuh.
#pragma once

#include "ops/causal_softmax/causal_softmax.h"
#include "softmax/config.h"
#include "softmax/parts.cuh"

namespace torchweld {

// kElems is the number of elements in a 16-byte access, or 1.
template <typename T, int kElems>
__global__ __launch_bounds__(kSoftmaxStreamThreads) void capped_softmax_backward_kernel(
    const RowArgs<T> args, const ScoresMask<MaskKind::kCapped> mask, const CappedBackward capped) {
  using Mask = ScoresMask<MaskKind::kCapped>;
  __shared__ BlockExchange<kSoftmaxStreamThreads> s_dot, s_scores;

  const auto exponent = exponent_of<T>(mask);
  const int step = blockDim.x * kElems;
  const int64_t row = blockIdx.x, whole_row = args.first_row + row;
  const KeyRange live = mask.live(whole_row);
  const T* g_y = args.g_x + row * args.x_row_stride;
  const T* g_dy = args.g_dy + row * args.dy_row_stride;
  const T* g_x = static_cast<const T*>(capped.scores) + whole_row * capped.row_stride;
  T* g_dx = args.g_y + row * args.n;
  const int64_t start = live.begin / kElems * kElems + threadIdx.x * kElems;

  float dot = 0.f;
  MaxSum part = {-INFINITY, 0.f};
  for (int64_t first = start; first < live.end; first += step) {
    float y[kElems], dy[kElems];
    unpack<Mask>(y, load_vec<T, kElems>(g_y + first), live, first, 1.f, 0.f);
    unpack<Mask>(dy, load_vec<T, kElems>(g_dy + first), live, first, 1.f, 0.f);
#pragma unroll
    for (int j = 0; j < kElems; ++j) dot += y[j] * dy[j];
    if (capped.sink_terms) {
      float r_x[kElems];
      unpack_scores<Mask>(r_x, load_vec<T, kElems>(g_x + first), live, first, exponent);
      accumulate(part, largest(r_x), r_x, exponent);
    }
  }
  dot = s_dot.sum_warps(warp_sum(dot));
  if (capped.sink_terms) {
    const MaxSum total = s_scores.merge_warps(warp_merge(part, exponent), exponent);
    const float sink = mask.sink(whole_row);
    if (threadIdx.x == 0) {
      // The term of a row that sees no key is 0.
      const float p_sink = expf(sink - exponent.finish(total, sink).lse);
      capped.sink_terms[whole_row] = live.empty() ? 0.f : -p_sink * dot;
    }
  }

  for (int64_t first = threadIdx.x * kElems; first < args.n; first += step) {
    Vec<T, kElems> out = {};
    if (touches<Mask>(live, first, kElems)) {
      float y[kElems], dy[kElems];
      unpack<Mask>(y, load_vec<T, kElems>(g_y + first), live, first, mask.scale(), 0.f);
      unpack<Mask>(dy, load_vec<T, kElems>(g_dy + first), live, first, 1.f, 0.f);
#pragma unroll
      for (int j = 0; j < kElems; ++j) y[j] *= dy[j] - dot;
      if (exponent.scale.softcap > 0.f) {
        float r_x[kElems];
        unpack_scores<Mask>(r_x, load_vec<T, kElems>(g_x + first), live, first, exponent);
#pragma unroll
        for (int j = 0; j < kElems; ++j) y[j] *= 1.f - r_x[j] * r_x[j];
      }
#pragma unroll
      for (int j = 0; j < kElems; ++j) {
        out.values[j] = from_float<T>(sees(live, first + j) ? y[j] : 0.f);
      }
    }
    store_vec(g_dx + first, out);
  }
}

}  // namespace torchweld
