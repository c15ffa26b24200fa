// What comes before and after the products of attention's gradient on Hopper: statistics of the
// query rows, dQ from its sums, dK and dV from those of a group's parts.
#pragma once

#include <climits>

#include "attention/sm90/bwd_block.cuh"
#include "core/launch.h"
#include "device/features.cuh"
#include "device/sm90/stmatrix.cuh"

namespace torchweld {

inline constexpr int kSm90RowThreads = 256;

// Which rows of a sequence see keys.
template <typename Args>
struct BackwardLiveRows {
  const Args& args;
  const int sequence;
  int first = 0;

  __device__ __forceinline__ BackwardLiveRows(const Args& args, int sequence)
      : args(args), sequence(sequence) {
    if constexpr (!kIsMasked<Args>) first = LiveSpan(args, sequence).first_row;
  }
  __device__ __forceinline__ bool sees(int row) const {
    if constexpr (kIsMasked<Args>) {
      const RowRange live = args.live_of(sequence, row);
      return live.begin < live.end;
    } else {
      return row >= first;
    }
  }
  // Whether one of the tile's rows does.
  template <int kRows>
  __device__ __forceinline__ bool any_of(int first_row) const {
    if constexpr (kIsMasked<Args>) {
      return args.group_of(sequence, first_row).live != 0;
    } else {
      return first_row + kRows > first && first < args.rule.seqlen_q;
    }
  }
};

// lse and delta of every row of the scratch memory; clears the tickets and the turns behind them,
// `counters` in all. kDim / 8 lanes a row, four rows each.
template <typename T, int kDim, typename Args>
__global__ void __launch_bounds__(kSm90RowThreads)
    attention_backward_sm90_rows_kernel(const __grid_constant__ Args args, int64_t counters) {
  constexpr int kLanes = kDim / 8, kRowsAtOnce = kSm90RowThreads / kLanes, kTurns = 4;
  const AttentionBackwardParams& p = args.params;
  const int64_t thread = int64_t{blockIdx.x} * kSm90RowThreads + threadIdx.x;
  for (int64_t i = thread; i < counters; i += int64_t{gridDim.x} * kSm90RowThreads) {
    args.g_tickets[i] = 0;
  }
  const int lane = threadIdx.x % kLanes, dim = static_cast<int>(p.sizes.head_dim_v);
  const unsigned nheads = static_cast<unsigned>(p.sizes.nheads),
                 rows = static_cast<unsigned>(args.rows),
                 all = static_cast<unsigned>(p.sizes.batch) * nheads * rows;  // below 2^31
  const unsigned first = blockIdx.x * (kRowsAtOnce * kTurns) + threadIdx.x / kLanes;
  uint4 r_out[kTurns], r_dout[kTurns];
  bool live[kTurns];
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    const unsigned at = first + i * kRowsAtOnce;
    const unsigned head_of_all = at / rows, row = at % rows;
    const unsigned sequence = head_of_all / nheads, head = head_of_all % nheads;
    live[i] = at < all && row < p.sizes.seqlen_q;
    if (live[i]) {
      live[i] = BackwardLiveRows<Args>(args, int(sequence)).sees(int(row));
    }
    r_out[i] = r_dout[i] = make_uint4(0, 0, 0, 0);
    if (live[i] && lane * 8 < dim) {
      const auto row_of = [&](const AttentionTensor& t) {
        return load_words(head_of<T>(t, sequence, head) + row * t.row_stride + lane * 8);
      };
      r_out[i] = row_of(p.out);
      r_dout[i] = row_of(p.dout);
    }
  }
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    const unsigned at = first + i * kRowsAtOnce;
    float x[8], y[8], delta = 0.f;
    to_floats<T>(x, r_out[i]);
    to_floats<T>(y, r_dout[i]);
#pragma unroll
    for (int j = 0; j < 8; ++j) delta = fmaf(x[j], y[j], delta);
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) {
      delta += __shfl_xor_sync(~0u, delta, step);
    }
    if (lane == 0 && at < all) {
      const int64_t from = at / rows * p.sizes.seqlen_q + at % rows;
      args.g_lse[at] = live[i] ? args.shift - p.lse[from] * args.lse_factor : -INFINITY;
      args.g_delta[at] = delta * (1.f / (1 << kProbabilityShift<T>));
    }
  }
}

template <typename T, int kTile, typename Args>
void launch_attention_backward_sm90_rows(const Args& args, cudaStream_t stream) {
  constexpr AttentionBackwardSm90Tile kShape = kAttentionBackwardSm90Tiles[kTile];
  constexpr int kRows = kIsMasked<Args> ? kShape.kMaskedRows : kShape.rows;
  constexpr int kRowsPerBlock = kSm90RowThreads / (kShape.dim / 8) * 4;
  const int64_t rows = args.params.sizes.batch * args.params.sizes.nheads * args.rows;
  launch_kernel(attention_backward_sm90_rows_kernel<T, kShape.dim, Args>,
                {divide_up(rows, kRowsPerBlock), kSm90RowThreads}, stream, args,
                kBackwardTickets + rows / kRows * kShape.blocks);
}

// `keys` of a block.
template <typename Config>
typename Config::Params backward_sm90_params(const typename Config::Args& args, int keys) {
  const AttentionBackwardParams& a = args.params;
  const AttentionSizes& sizes = a.sizes;
  const auto map = [&](const AttentionTensor& t, int64_t heads, int64_t rows, int64_t columns,
                       int box_rows) {
    return attention_tensor_map("attention_backward", a.dtype, t, sizes.batch, heads, rows, columns,
                                box_rows);
  };
  const auto result = [&](void* data, int64_t columns) {
    const int64_t head = sizes.seqlen_k * columns;
    return map({data, sizes.nheads_kv * head, head, columns}, sizes.nheads_kv, sizes.seqlen_k,
               columns, 64);
  };
  return {map(a.query, sizes.nheads, sizes.seqlen_q, sizes.head_dim, Config::kRows),
          map(a.key, sizes.nheads_kv, sizes.seqlen_k, sizes.head_dim, keys),
          map(a.value, sizes.nheads_kv, sizes.seqlen_k, sizes.head_dim_v, keys),
          map(a.dout, sizes.nheads, sizes.seqlen_q, sizes.head_dim_v, Config::kRows),
          result(a.dkey, sizes.head_dim),
          result(a.dvalue, sizes.head_dim_v),
          args};
}

// dQ of a query tile from the fragments of dQ^T, through shared memory. A block takes a tile.
template <typename Config>
__global__ void __launch_bounds__(kSm90RowThreads)
    attention_backward_sm90_dq_kernel(const __grid_constant__ typename Config::Args args) {
#if TW_HAS_CLUSTERS
  using T = typename Config::T;
  constexpr int kRows = Config::kRows, kDim = Config::kDim, kFloats = Config::kShareFloats;
  constexpr int kPitch = kDim * 2 + 16;  // bytes; rows of an stmatrix lie in different banks
  __shared__ alignas(16) char s_tile[kRows * kPitch];
  const AttentionSizes& sizes = args.params.sizes;
  const int tiles = static_cast<int>(args.rows) / kRows,
            seqlen_q = static_cast<int>(sizes.seqlen_q);
  const int tile = blockIdx.x % tiles, head = blockIdx.x / tiles, first_row = tile * kRows;
  const BackwardLiveRows<typename Config::Args> live(args, head / static_cast<int>(sizes.nheads));
  if (live.template any_of<kRows>(first_row)) {
    const float scale = args.params.scale;
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
#pragma unroll
    for (int first = 0; first < Config::kShares; first += 2) {
      const int share = first + threadIdx.x / 128;
      const float4* g_from = reinterpret_cast<const float4*>(args.g_dq) +
                             (int64_t{blockIdx.x} * Config::kShares + share) * (kFloats / 4 * 128) +
                             threadIdx.x % 128;
      float4 r[kFloats / 4];
#pragma unroll
      for (int i = 0; i < kFloats / 4; ++i) r[i] = g_from[i * 128];
      const int col = (kDim == 64 ? 0 : share * 64) + warp * 16 + lane / 8 % 2 * 8;
      const int row = (kDim == 64 ? share * Config::kShareRows : 0) + lane % 8;
      const uint32_t s_lane = shared_address(s_tile) + row * kPitch + col * 2;
#pragma unroll
      for (int i = 0; i < kFloats / 4; i += 2) {
        const uint32_t words[4] = {pack_pair<T>(r[i].x * scale, r[i].y * scale),
                                   pack_pair<T>(r[i].z * scale, r[i].w * scale),
                                   pack_pair<T>(r[i + 1].x * scale, r[i + 1].y * scale),
                                   pack_pair<T>(r[i + 1].z * scale, r[i + 1].w * scale)};
        store_matrix_4_transposed(s_lane + (lane < 16 ? i : i + 1) * 8 * kPitch, words);
      }
    }
  }
  __syncthreads();
  constexpr int kPieces = kDim / 8;
  const int dim = static_cast<int>(sizes.head_dim);
  T* const g_to =
      static_cast<T*>(args.params.dquery) + (int64_t{head} * seqlen_q + first_row) * dim;
  for (int i = threadIdx.x; i < kRows * kPieces; i += kSm90RowThreads) {
    const int row = i / kPieces, piece = i % kPieces;
    if (first_row + row >= seqlen_q) break;
    if (piece * 8 >= dim) continue;
    uint4 words = make_uint4(0, 0, 0, 0);
    if (live.sees(first_row + row)) {
      words = *reinterpret_cast<const uint4*>(s_tile + row * kPitch + piece * 16);
    }
    *reinterpret_cast<uint4*>(g_to + row * dim + piece * 8) = words;
  }
#endif
}

// dK and dV of 64 keys and 64 columns from the sums of a group's parts. A block takes one of them.
template <typename T>
__global__ void __launch_bounds__(kSm90RowThreads)
    attention_backward_sm90_parts_kernel(const __grid_constant__ BackwardArgs args, int columns) {
  constexpr int kPieces = 4;  // 8 columns each, of a thread
  const AttentionSizes& sizes = args.params.sizes;
  const int tiles = static_cast<int>(attention_backward_part_tiles(sizes.seqlen_k));
  const int parts = static_cast<int>(args.group_parts), lines = columns / 64,
            seqlen_k = static_cast<int>(sizes.seqlen_k);
  const bool of_dv = blockIdx.x % 2 == 1;
  const int line = blockIdx.x / 2 % lines, tile = blockIdx.x / (2 * lines) % tiles,
            head = blockIdx.x / (2 * lines) / tiles;
  const int dim = static_cast<int>(of_dv ? sizes.head_dim_v : sizes.head_dim);
  if (line * 64 >= dim) return;  // nobody has written those columns
  const int thread = threadIdx.x % 128, lane = thread % 32;
  const int first_piece = line * 8 + threadIdx.x / 128 * kPieces;
  float4 sums[kPieces] = {};
  for (int part = 0; part < parts; ++part) {
    const float4* g_from =
        args.part_sums(head * parts + part, tile, of_dv, columns) + first_piece * 128 + thread;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const float4 x = g_from[i * 128];
      sums[i] = make_float4(sums[i].x + x.x, sums[i].y + x.y, sums[i].z + x.z, sums[i].w + x.w);
    }
  }
  const int key = tile * 64 + thread / 32 * 16 + lane / 4;
  T* const g_to = static_cast<T*>(of_dv ? args.params.dvalue : args.params.dkey) +
                  int64_t{head} * seqlen_k * dim;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int column = (first_piece + i) * 8 + lane % 4 * 2;
    if (column >= dim) break;
    const auto put = [&](int key, float x, float y) {
      if (key >= seqlen_k) return;
      *reinterpret_cast<uint32_t*>(g_to + int64_t{key} * dim + column) = pack_pair<T>(x, y);
    };
    put(key, sums[i].x, sums[i].y);
    put(key + 8, sums[i].z, sums[i].w);
  }
}

// What follows the tiles: dQ, and dK and dV where a group has parts.
template <typename Config>
void launch_attention_backward_sm90_sums(const typename Config::Args& args, cudaStream_t stream) {
  const AttentionSizes& sizes = args.params.sizes;
  const int64_t tiles = sizes.batch * sizes.nheads * (args.rows / Config::kRows);
  launch_kernel(attention_backward_sm90_dq_kernel<Config>, {tiles, kSm90RowThreads}, stream, args);
  if (args.group_parts == 1) return;
  constexpr int kLines = Config::kDim / 64;
  const int64_t key_tiles = attention_backward_part_tiles(sizes.seqlen_k);
  launch_kernel(attention_backward_sm90_parts_kernel<typename Config::T>,
                {sizes.batch * sizes.nheads_kv * key_tiles * kLines * 2, kSm90RowThreads}, stream,
                static_cast<const BackwardArgs&>(args), Config::kDim);
}

}  // namespace torchweld
