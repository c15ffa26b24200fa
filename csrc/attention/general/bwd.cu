// The gradient of attention for any head dim, in fp32 arithmetic. It is used for head dims above
// 256 without a kernel on tensor cores, and for fp32 head dims above 128 on devices with 99 KB of
// shared memory per block. It is not optimised for speed.
//
// A block computes one row of dQ, or one row of dK and the same row of dV. The block loops over the
// rows of the other operand: keys for dQ, query rows for dK and dV. It computes p and ds for kChunk
// of these rows, one row per warp at a time. Then every thread sums one column of the gradient. If
// a head has more than kBackwardThreads columns, p and ds are recomputed for every kBackwardThreads
// columns.
#include "attention/bwd_args.cuh"
#include "attention/sync/bwd_parts.cuh"
#include "core/launch.h"

namespace torchweld {
namespace {

constexpr int kBackwardThreads = 256;
constexpr int kBackwardWarps = kBackwardThreads / kWarp;
constexpr int kChunk = 256;

template <typename T>
__device__ __forceinline__ float warp_dot(const T* g_x, const T* g_y, int64_t n) {
  float sum = 0.f;
  for (int64_t i = threadIdx.x % kWarp; i < n; i += kWarp) {
    sum = fmaf(to_float(g_x[i]), to_float(g_y[i]), sum);
  }
  return warp_sum(sum);
}

// Returns the KV head of a query head. All head counts fit in 32 bits (kBackwardMaxSize).
// NOTE: a 64-bit division is a function call, for which the kernels would spill registers.
__device__ __forceinline__ int64_t kv_head_of(const AttentionSizes& sizes, int64_t head) {
  const uint32_t group =
      static_cast<uint32_t>(sizes.nheads) / static_cast<uint32_t>(sizes.nheads_kv);
  return static_cast<uint32_t>(head) / group;
}

struct Weight {
  float p, ds;
};
constexpr float kHidden = -1.f;  // the value of p for a row that does not see the key

// Computes p and ds of one query row and one key. All lanes of a warp call this function.
template <typename T, typename Args>
__device__ __forceinline__ Weight weight(const Args& args, int64_t sequence, int64_t head,
                                         int64_t row, int64_t key) {
  const AttentionBackwardParams& p = args.params;
  const int64_t head_kv = kv_head_of(p.sizes, head);
  const float score =
      warp_dot(head_of<T>(p.query, sequence, head) + row * p.query.row_stride,
               head_of<T>(p.key, sequence, head_kv) + key * p.key.row_stride, p.sizes.head_dim);
  const float dp = warp_dot(head_of<T>(p.dout, sequence, head) + row * p.dout.row_stride,
                            head_of<T>(p.value, sequence, head_kv) + key * p.value.row_stride,
                            p.sizes.head_dim_v);
  const int64_t stats = (sequence * p.sizes.nheads + head) * args.rows + row;
  float x = fmaf(score, args.score_factor, args.g_lse[stats]);
  [[maybe_unused]] float slope = 1.f;  // slope of the soft cap at this score
  if constexpr (kIsMasked<Args>) {
    if (args.params.mask.softcap > 0.f) {
      const float capped = tanhf(score * args.cap);
      x = fmaf(capped, args.params.mask.softcap * args.score_factor, args.g_lse[stats]);
      slope = fmaf(-capped, capped, 1.f);
    }
    const AttentionBias& bias = args.params.mask.bias;
    if (bias.given()) {
      x = fmaf(to_float(bias.row<T>(sequence, head, row)[key]), args.lse_factor, x);
    }
    const MaskParams& mask = args.params.mask;
    if (mask.alibi) {
      const int64_t distance = key - mask.position(row, mask.sequence(sequence).end);
      x -= args.lse_factor * mask.alibi_slope(head) * fabsf(static_cast<float>(distance));
    }
  }
  const float probability = exponential<T>(x);
  constexpr float kUnshift = 1.f / (1 << kProbabilityShift<T>);
  const AttentionDropout& dropout = p.mask.dropout;
  const float keep =
      dropout.given() ? dropout.factor_of(sequence * p.sizes.nheads + head, row, key) : 1.f;
  const float ds = probability * fmaf(dp * keep, kUnshift, -args.g_delta[stats]);
  return {probability * keep * kUnshift, kIsMasked<Args> ? ds * slope : ds};
}

// NOTE: three blocks per SM leave 80 registers per thread. Without the bound of three blocks, the
// compiler would use 64 registers and spill.
template <typename T, typename Args>
__global__ __launch_bounds__(kBackwardThreads, 3) void attention_backward_general_rows_kernel(
    const __grid_constant__ Args args) {
  __shared__ float s_ds[kChunk];
  const AttentionBackwardParams& p = args.params;
  const int64_t rows = p.sizes.batch * p.sizes.nheads * p.sizes.seqlen_q;
  for (int64_t item = blockIdx.x; item < rows; item += gridDim.x) {
    const int64_t row = item % p.sizes.seqlen_q;
    const uint32_t head_of_all = static_cast<uint32_t>(item / p.sizes.seqlen_q),
                   nheads = static_cast<uint32_t>(p.sizes.nheads);
    const int64_t sequence = head_of_all / nheads, head = head_of_all % nheads;
    const int64_t head_kv = kv_head_of(p.sizes, head);
    KeyRange live;
    if constexpr (kIsMasked<Args>) {
      const KeyRange32 range = args.live_of(static_cast<int>(sequence), static_cast<int>(row));
      if (range.begin >= range.end) continue;  // this row of dQ is already 0
      live = {range.begin, range.end};
    } else {
      const SequenceSpan span(args, sequence);
      if (row < span.first_row) continue;  // this row of dQ is already 0
      live = args.params.mask.row_keys(row, span.pad);
    }
    const T* g_keys = head_of<T>(p.key, sequence, head_kv);
    T* g_dq = p.dquery.row<T>(sequence, head, row);
    // With a bias, a head dim of 0 has scores, too.
    const int64_t cols = p.ds.data && p.sizes.head_dim == 0 ? 1 : p.sizes.head_dim;
    for (int64_t col = threadIdx.x; col - threadIdx.x < cols; col += kBackwardThreads) {
      float sum = 0.f;
      for (int64_t first = live.begin; first < live.end; first += kChunk) {
        const int keys = live.end - first < kChunk ? static_cast<int>(live.end - first) : kChunk;
        __syncthreads();
        for (int i = threadIdx.x / kWarp; i < keys; i += kBackwardWarps) {
          const Weight w = weight<T>(args, sequence, head, row, first + i);
          if (threadIdx.x % kWarp != 0) continue;
          s_ds[i] = w.ds;
          if constexpr (kIsMasked<Args>) {
            if (p.ds.data) p.ds.row<T>(sequence, head, row)[first + i] = from_float<T>(w.ds);
          }
        }
        __syncthreads();
        if (col >= p.sizes.head_dim) continue;
#pragma unroll 1
        for (int i = 0; i < keys; ++i) {
          sum = fmaf(s_ds[i], to_float(g_keys[(first + i) * p.key.row_stride + col]), sum);
        }
      }
      if (col < p.sizes.head_dim) g_dq[col] = from_float<T>(sum * p.scale);
    }
  }
}

template <typename T, typename Args>
__global__ __launch_bounds__(kBackwardThreads, 3) void attention_backward_general_keys_kernel(
    const __grid_constant__ Args args) {
  __shared__ Weight s_weights[kChunk];
  const AttentionBackwardParams& p = args.params;
  const int64_t keys = p.sizes.batch * p.sizes.nheads_kv * p.sizes.seqlen_k;
  const int64_t group = p.sizes.nheads / p.sizes.nheads_kv;
  const int64_t cols =
      p.sizes.head_dim > p.sizes.head_dim_v ? p.sizes.head_dim : p.sizes.head_dim_v;
  for (int64_t item = blockIdx.x; item < keys; item += gridDim.x) {
    const uint32_t head_of_all = static_cast<uint32_t>(item / p.sizes.seqlen_k),
                   nheads_kv = static_cast<uint32_t>(p.sizes.nheads_kv);
    const int key = static_cast<int>(item - head_of_all * p.sizes.seqlen_k);
    const int64_t sequence = head_of_all / nheads_kv, head_kv = head_of_all % nheads_kv;
    // `begin` is the first row that sees the key. Under a general mask, `begin` is 0, and the loop
    // skips rows that don't see the key.
    int64_t begin = 0;
    if constexpr (!kIsMasked<Args>) {
      const SequenceSpan span(args, sequence);
      begin = key < span.pad ? p.sizes.seqlen_q : span.first_row_seeing(args.params.mask, key);
    }
    for (int64_t col = threadIdx.x; col - threadIdx.x < cols; col += kBackwardThreads) {
      float dk = 0.f, dv = 0.f;
      for (int64_t head = head_kv * group; head < (head_kv + 1) * group; ++head) {
        const T* g_query = head_of<T>(p.query, sequence, head);
        const T* g_dout = head_of<T>(p.dout, sequence, head);
        for (int64_t first = begin; first < p.sizes.seqlen_q; first += kChunk) {
          const int64_t left = p.sizes.seqlen_q - first;
          const int rows = left < kChunk ? static_cast<int>(left) : kChunk;
          __syncthreads();
          for (int i = threadIdx.x / kWarp; i < rows; i += kBackwardWarps) {
            if constexpr (kIsMasked<Args>) {
              const KeyRange32 live =
                  args.live_of(static_cast<int>(sequence), static_cast<int>(first) + i);
              if (key < live.begin || key >= live.end) {
                s_weights[i].p = kHidden;
                continue;
              }
            }
            const Weight w = weight<T>(args, sequence, head, first + i, key);
            if (threadIdx.x % kWarp == 0) s_weights[i] = w;
          }
          __syncthreads();
          constexpr int kUnroll = kIsMasked<Args> ? 1 : 4;
#pragma unroll kUnroll
          for (int i = 0; i < rows; ++i) {
            const int64_t row = first + i;
            if (kIsMasked<Args> && s_weights[i].p == kHidden) continue;
            if (col < p.sizes.head_dim) {
              dk = fmaf(s_weights[i].ds, to_float(g_query[row * p.query.row_stride + col]), dk);
            }
            if (col < p.sizes.head_dim_v) {
              dv = fmaf(s_weights[i].p, to_float(g_dout[row * p.dout.row_stride + col]), dv);
            }
          }
        }
      }
      if (col < p.sizes.head_dim) {
        p.dkey.row<T>(sequence, head_kv, key)[col] = from_float<T>(dk * p.scale);
      }
      if (col < p.sizes.head_dim_v) {
        p.dvalue.row<T>(sequence, head_kv, key)[col] = from_float<T>(dv);
      }
    }
  }
}

int64_t blocks_for(int64_t items) { return items < kMaxGrid ? items : kMaxGrid; }

}  // namespace

template <typename T, typename Args>
void launch_attention_backward_general(const Args& args, cudaStream_t stream) {
  const AttentionSizes& sizes = args.params.sizes;
  const int64_t rows = sizes.batch * sizes.nheads * sizes.seqlen_q;
  const int64_t keys = sizes.batch * sizes.nheads_kv * sizes.seqlen_k;
  if (rows > 0 && keys > 0) {
    launch_kernel(attention_backward_general_rows_kernel<T, Args>,
                  {blocks_for(rows), kBackwardThreads}, stream, args);
  }
  if (keys > 0) {
    launch_kernel(attention_backward_general_keys_kernel<T, Args>,
                  {blocks_for(keys), kBackwardThreads}, stream, args);
  }
}

template void launch_attention_backward_general<float>(const BackwardArgs&, cudaStream_t);
template void launch_attention_backward_general<__half>(const BackwardArgs&, cudaStream_t);
template void launch_attention_backward_general<__nv_bfloat16>(const BackwardArgs&, cudaStream_t);
template void launch_attention_backward_general<float>(const MaskedBackwardArgs&, cudaStream_t);
template void launch_attention_backward_general<__half>(const MaskedBackwardArgs&, cudaStream_t);
template void launch_attention_backward_general<__nv_bfloat16>(const MaskedBackwardArgs&,
                                                               cudaStream_t);

}  // namespace torchweld
