// The forward of attention for any head dim, in fp32 arithmetic. It is used for calls that no
// tensor-core kernel supports.
//
// A block computes the output of one query row. It loops over the keys that the row sees, kThreads
// keys at a time. In each step the warps compute the scores, and then every thread sums kCols
// columns of the output. If the output has more than kThreads * kCols columns, the loop runs again
// for the next columns.
#include "attention/fwd.h"
#include "core/launch.h"
#include "device/dispatch.cuh"
#include "device/reduce.cuh"
#include "device/vec.cuh"

namespace torchweld {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;
constexpr int kCols = 4;
// NOTE: six blocks per SM leave 80 registers per thread. Without the bound, the compiler would use
// 56 for sm_80 and spill. With seven blocks, dropout would spill.
constexpr int kBlocks = 6;

// Computes the scores of `keys` keys and multiplies them by `sign`. Each warp computes the score of
// one key at a time.
template <typename T>
__device__ __forceinline__ void make_scores(float (&s_scores)[kThreads], const T* g_query,
                                            const T* g_key, int64_t key_stride, int keys,
                                            int64_t head_dim, float sign) {
  const int lane = threadIdx.x % kWarp;
  for (int j = threadIdx.x / kWarp; j < kThreads; j += kWarps) {
    float score = 0.f;
    if (j < keys) {
      const T* g_row = g_key + j * key_stride;
      for (int64_t d = lane; d < head_dim; d += kWarp) {
        score = fmaf(to_float(g_query[d]), to_float(g_row[d]), score);
      }
    }
    score = warp_sum(score);
    if (lane == 0) s_scores[j] = j < keys ? score * sign : -INFINITY;
  }
}

template <typename T, typename Variant>
__global__ __launch_bounds__(kThreads, kBlocks) void attention_general_kernel(
    const AttentionParams params, const typename Variant::Scale scale, int64_t first_block,
    int group) {
  __shared__ float s_scores[kThreads];
  __shared__ float s_p[kThreads];

  const AttentionSizes& sizes = params.sizes;
  const int64_t row = first_block + blockIdx.x;
  const int64_t i = row % sizes.seqlen_q, batch_head = row / sizes.seqlen_q;
  const int64_t batch = batch_head / sizes.nheads, head = batch_head % sizes.nheads;
  // NOTE: a 64-bit division is a function call, which would spill registers here.
  const int64_t kv_head = static_cast<uint32_t>(head) / static_cast<uint32_t>(group);
  const auto matrix_of = [&](const AttentionTensor& tensor, int64_t head_of) {
    return static_cast<const T*>(tensor.data) + batch * tensor.batch_stride +
           head_of * tensor.head_stride;
  };
  const MaskParams mask = params.mask;
  const KeyRange live = [&] {
    if constexpr (Variant::kMasked) {
      return mask.row_keys(i, mask.sequence(batch));
    } else {
      return mask.row_keys(i, mask.pad(batch));
    }
  }();
  const T* g_query = matrix_of(params.query, head) + i * params.query.row_stride;
  const T* g_key = matrix_of(params.key, kv_head);
  const T* g_value = matrix_of(params.value, kv_head);
  const T* g_bias = mask.bias.row<T>(batch, head, i);  // null if there is no bias
  const float slope = mask.alibi ? mask.alibi_slope(head) / scale.size : 0.f;
  T* g_out = params.out.row<T>(batch, head, i);

  int64_t first_col = 0;
  do {
    float r_out[kCols] = {};
    MaxSum total = {-INFINITY, 0.f};
    for (int64_t key = live.begin; key < live.end; key += kThreads) {
      const int keys = static_cast<int>(min(live.end - key, static_cast<int64_t>(kThreads)));
      make_scores(s_scores, g_query, g_key + key * params.key.row_stride, params.key.row_stride,
                  keys, sizes.head_dim, scale.sign);
      __syncthreads();
      if constexpr (Variant::kMasked) {
        if (mask.alibi) {
          if (threadIdx.x < keys) {
            const int64_t distance = key + threadIdx.x - mask.position(i, mask.sequence(batch).end);
            s_scores[threadIdx.x] -= slope * fabsf(static_cast<float>(distance));
          }
          __syncthreads();
        }
        if (scale.softcap > 0.f) {
          float& score = s_scores[threadIdx.x];
          if (threadIdx.x < keys) score = tanhf(score * scale.cap);
          __syncthreads();
        }
        if (g_bias) {
          if (threadIdx.x < keys) {
            s_scores[threadIdx.x] += to_float(g_bias[key + threadIdx.x]) / scale.size;
          }
          __syncthreads();
        }
      }

      // Every warp reads all scores, so that all warps have the same maximum and sum.
      float max = total.max, sum = 0.f;
      for (int j = threadIdx.x % kWarp; j < kThreads; j += kWarp) max = fmaxf(max, s_scores[j]);
      max = warp_max(max);
      const float top = max == -INFINITY ? 0.f : max;
      const float factor = exp2_approx((total.max - top) * scale.c);
      for (int j = threadIdx.x % kWarp; j < kThreads; j += kWarp) {
        sum += exp2_approx((s_scores[j] - top) * scale.c);
      }
      total = {max, fmaf(total.sum, factor, warp_sum(sum))};
      float p = exp2_approx((s_scores[threadIdx.x] - top) * scale.c);
      if (mask.dropout.given()) p *= mask.dropout.factor_of(batch_head, i, key + threadIdx.x);
      s_p[threadIdx.x] = p;
      __syncthreads();

#pragma unroll
      for (int c = 0; c < kCols; ++c) {
        const int64_t col = first_col + c * kThreads + threadIdx.x;
        if (col >= sizes.head_dim_v) break;
        r_out[c] *= factor;
        const T* g_column = g_value + key * params.value.row_stride + col;
        for (int j = 0; j < keys; ++j) {
          r_out[c] = fmaf(s_p[j], to_float(g_column[j * params.value.row_stride]), r_out[c]);
        }
      }
    }

    float sink = -INFINITY;
    if constexpr (Variant::kMasked) {
      if (params.mask.sink) sink = params.mask.sink[head];
    }
    const FinishedRow finished = finish_row(scale, total.max, total.sum, sink);
#pragma unroll
    for (int c = 0; c < kCols; ++c) {
      const int64_t col = first_col + c * kThreads + threadIdx.x;
      if (col >= sizes.head_dim_v) break;
      g_out[col] = from_float<T>(live.empty() ? 0.f : r_out[c] * finished.factor);
    }
    if (params.lse && first_col == 0 && threadIdx.x == 0) {
      params.lse[row] = live.empty() ? sink : finished.lse;
    }
    first_col += kCols * kThreads;
  } while (first_col < sizes.head_dim_v);
}

}  // namespace

template <bool kMasked>
void launch_attention_general(const AttentionParams& params, cudaStream_t stream) {
  const int64_t rows = params.sizes.batch * params.sizes.nheads * params.sizes.seqlen_q;
  const int group = static_cast<int>(params.sizes.nheads / params.sizes.nheads_kv);
  dispatch_dtype(params.dtype, [&](auto element) {
    using T = decltype(element);
    for_each_grid_of(rows, [&](int64_t first, int64_t blocks) {
      launch_kernel(attention_general_kernel<T, AttentionVariant<kMasked>>, {blocks, kThreads},
                    stream, params, AttentionVariant<kMasked>::scale(params), first, group);
    });
  });
}

template void launch_attention_general<false>(const AttentionParams&, cudaStream_t);
template void launch_attention_general<true>(const AttentionParams&, cudaStream_t);

}  // namespace torchweld
