// The kernel of attention's backward on Hopper that runs before the products: it computes lse and
// delta of the query rows.
#pragma once

#include "attention/bwd_key_tiles.cuh"
#include "attention/sm90/bwd_block.cuh"
#include "core/launch.h"
#include "device/sm90/dependent_launch.cuh"

namespace torchweld {

inline constexpr int kSm90RowThreads = 256;

// Tells which query rows of a sequence see keys.
template <typename Args>
struct BackwardLiveRows {
  const Args& args;
  const int sequence;
  int first = 0;

  __device__ __forceinline__ BackwardLiveRows(const Args& args, int sequence)
      : args(args), sequence(sequence) {
    if constexpr (!kIsMasked<Args>) first = SequenceSpan(args, sequence).first_row;
  }
  __device__ __forceinline__ bool sees(int row) const {
    if constexpr (kIsMasked<Args>) {
      const KeyRange32 live = args.live_of(sequence, row);
      return live.begin < live.end;
    } else {
      return row >= first;
    }
  }
  // Whether any row of the tile that starts at first_row sees a key.
  template <int kRows>
  __device__ __forceinline__ bool any_of(int first_row) const {
    if constexpr (kIsMasked<Args>) {
      return args.group_of(sequence, first_row).live != 0;
    } else {
      return first_row + kRows > first && first < args.params.mask.seqlen_q;
    }
  }
};

// Splits x into three bfloat16 numbers whose sum is x. Returns each number in the upper half of a
// word. If x is not finite, the first number is x.
__device__ __forceinline__ uint3 split_into_bfloat16(float x) {
  const auto upper = [](float x) { return __float_as_uint(x) & 0xffff0000u; };
  const uint32_t a = upper(x);
  const float rest = fabsf(x) < INFINITY ? x - __uint_as_float(a) : 0.f;
  const uint32_t b = upper(rest);
  return {a, b, upper(rest - __uint_as_float(b))};
}

// Returns a row of StatSliceTile: terms of score_offset, and terms of -delta.
__device__ __forceinline__ uint4 stat_slice_row(float score_offset, float delta) {
  const uint3 a = split_into_bfloat16(score_offset), d = split_into_bfloat16(-delta);
  return make_uint4(a.x >> 16 | a.y, a.z >> 16 | d.x, d.y >> 16 | d.z, 0);
}

// Computes lse and delta = sum(dout * out) - dlse of every query row of the scratch memory (batch,
// nheads, rows), including the padding rows. dlse is the gradient of lse. Because d lse / d score =
// p, dS = p * (dP - sum(dout * out)) + p * dlse = p * (dP - delta). The kernel also zeroes
// `counters` counters from g_tickets on: the ticket counters and the dQ semaphores behind them. It
// zeroes dQ of the rows that see no key. Under a general mask, the kernel also fills g_key_tiles.
// kDimV / 8 lanes compute a row together. A thread handles kRowsPerThread rows. Source: preprocess
// of FlashAttention-2's backward.
template <typename T, int kDimV, bool kStatSlice, typename Args>
__global__ void __launch_bounds__(kSm90RowThreads)
    attention_backward_sm90_preprocess_kernel(const __grid_constant__ Args args, int64_t counters) {
  constexpr int kLanes = kDimV / 8, kRowsAtOnce = kSm90RowThreads / kLanes, kRowsPerThread = 4;
  griddep_launch_dependents();
  griddep_wait();
  const AttentionBackwardParams& p = args.params;
  if constexpr (kIsMasked<Args>) fill_key_tiles<kSm90RowThreads>(args);
  const int64_t thread = int64_t{blockIdx.x} * kSm90RowThreads + threadIdx.x;
  for (int64_t i = thread; i < counters; i += int64_t{gridDim.x} * kSm90RowThreads) {
    args.g_tickets[i] = 0;
  }
  const int lane = threadIdx.x % kLanes, dim = static_cast<int>(p.sizes.head_dim_v);
  // The host refuses calls with 2^31 rows or more.
  const unsigned nheads = static_cast<unsigned>(p.sizes.nheads),
                 rows = static_cast<unsigned>(args.rows),
                 all_rows = static_cast<unsigned>(p.sizes.batch) * nheads * rows;
  const unsigned first = blockIdx.x * (kRowsAtOnce * kRowsPerThread) + threadIdx.x / kLanes;
  uint4 r_out[kRowsPerThread], r_dout[kRowsPerThread];
  bool live[kRowsPerThread];
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const unsigned flat_row = first + i * kRowsAtOnce;
    const unsigned batch_head = flat_row / rows, row = flat_row % rows;
    const unsigned sequence = batch_head / nheads, head = batch_head % nheads;
    live[i] = flat_row < all_rows && row < p.sizes.seqlen_q;
    if (live[i]) {
      live[i] = BackwardLiveRows<Args>(args, int(sequence)).sees(int(row));
    }
    r_out[i] = r_dout[i] = make_uint4(0, 0, 0, 0);
    if (args.rounds_dq && !live[i] && flat_row < all_rows && row < p.sizes.seqlen_q) {
      T* const g_dq = p.dquery.row<T>(sequence, head, row);
      for (int column = lane * 8; column < p.sizes.head_dim; column += kDimV) {
        *reinterpret_cast<uint4*>(g_dq + column) = make_uint4(0, 0, 0, 0);
      }
    }
    if (live[i] && lane * 8 < dim) {
      const auto load_row = [&](const AttentionTensor& t) {
        return load_words(head_of<T>(t, sequence, head) + row * t.row_stride + lane * 8);
      };
      r_out[i] = load_row(p.out);
      r_dout[i] = load_row(p.dout);
    }
  }
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const unsigned flat_row = first + i * kRowsAtOnce;
    float out[8], dout[8], delta = 0.f;
    to_floats<T>(out, r_out[i]);
    to_floats<T>(dout, r_dout[i]);
#pragma unroll
    for (int j = 0; j < 8; ++j) delta = fmaf(out[j], dout[j], delta);
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) {
      delta += __shfl_xor_sync(~0u, delta, step);
    }
    if (lane == 0 && flat_row < all_rows) {
      const int64_t lse_row = flat_row / rows * p.sizes.seqlen_q + flat_row % rows;
      const float lse = live[i] ? args.shift - p.lse[lse_row] * args.lse_factor : -INFINITY;
      if (p.dlse && live[i]) delta -= p.dlse[lse_row];
      if constexpr (kStatSlice) {
        args.g_stat_slice[flat_row] = stat_slice_row(lse / args.score_factor, delta);
      } else {
        args.g_lse[flat_row] = lse;
      }
      if constexpr (!kStatSlice || kIsMasked<Args>) {
        args.g_delta[flat_row] = delta * (1.f / (1 << kProbabilityShift<T>));
      }
    }
  }
}

template <typename T, int kTile, typename Args>
void launch_attention_backward_sm90_preprocess(const Args& args, cudaStream_t stream) {
  constexpr AttentionBackwardSm90Tile kShape = kAttentionBackwardSm90Tiles[kTile];
  constexpr int kRows = kIsMasked<Args> ? kShape.kMaskedRows : kShape.rows;
  constexpr bool kStatSlice =
      kShape.has_stat_slice(kIsMasked<Args>, kIsCapped<Args>, kIsDropped<Args>);
  constexpr int kRowsPerCta = kSm90RowThreads / (kShape.dim_v / 8) * 4;
  const int64_t rows = args.params.sizes.batch * args.params.sizes.nheads * args.rows;
  Grid grid(divide_up(rows, kRowsPerCta), kSm90RowThreads);
  grid.overlaps = true;
  launch_kernel(attention_backward_sm90_preprocess_kernel<T, kShape.dim_v, kStatSlice, Args>, grid,
                stream, args, kBackwardTickets + rows / kRows * kShape.blocks);
}

}  // namespace torchweld
