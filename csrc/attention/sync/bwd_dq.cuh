// Computes a deterministic dQ. Several blocks add to dQ of a query tile. The blocks add one after
// the other, in the order of their keys, so every run gives the same bits. The fixed order needs no
// extra pass. It is as fast as atomic additions: attention_backward (4, 16, 4096, 128) bfloat16
// causal was compared with SDPA flash, which adds to dQ atomically.
//
// A warp has the same slice of a query tile in every block, and each slice has its own semaphore.
// The first block stores its slice without reading earlier sums. The last block converts the sums
// into the result dQ.
//
// Under a general mask, BlockMask::begin and BlockMask::end bound the keys that a group of query
// rows sees. The blocks whose keys overlap this range add to dQ of the group's query tiles.
// dq_order_of() counts from the first of these blocks. Any other block has only hidden scores in
// such a tile. It may compute the tile, but it neither adds nor waits. Therefore, under a general
// mask too, a block waits only for blocks of lower key tiles.
#pragma once

#include "attention/bwd_args.cuh"
#include "attention/sync/bwd_parts.cuh"

namespace torchweld {

// A query tile. `index` is its number among the query tiles of head `head`. `head` counts over all
// batch * nheads heads.
struct QueryTile {
  int head;
  int index;
};

template <typename Config>
struct DqAccumulator {
  using T = typename Config::T;
  using Ops = typename Config::Ops;
  using KeyTile = typename Config::KeyTile;
  using ScoreTile = typename Config::ScoreTile;
  // Whether a warp's slice has 32 rows rather than 16. A slice of 32 rows must have at least 16
  // columns.
  static constexpr bool kTall =
      Config::kRows >= 32 && Config::kRows * Config::kHeadDim >= 32 * 16 * Config::kWarps;
  static constexpr int kSliceRows = kTall ? 32 : 16;
  static constexpr int kWarpsAcross = Config::kWarps / (Config::kRows / kSliceRows);
  static constexpr int kSliceCols = Config::kHeadDim / kWarpsAcross;
  static constexpr int kMTiles = kSliceRows / 16;
  static constexpr int kNTiles = kSliceCols / 8;
  static constexpr int kGroups = kNTiles / Ops::kMnTiles;
  static constexpr bool kPrefetches = Config::kShape.prefetches;
  static_assert(kMTiles * kNTiles * 4 == Config::kShape.dq_registers() && kGroups > 0);

  float r_sum[kMTiles][kNTiles][4];
  bool loaded = false;       // r_sum already holds the sum of the earlier blocks
  bool must_signal = false;  // add() has stored sums that signal() has not signalled yet

  static __device__ __forceinline__ int64_t index(const BackwardArgs& args, const QueryTile& tile) {
    const int64_t tiles = args.rows / Config::kRows;
    return (tile.head * tiles + tile.index) * Config::kWarps + threadIdx.x / kWarp;
  }

  static __device__ __forceinline__ float4* sums_at(const BackwardArgs& args, int64_t index) {
    return reinterpret_cast<float4*>(args.g_dq + index * (kMTiles * kNTiles * 4 * kWarp)) +
           threadIdx.x % kWarp;
  }

  // Loads the sums of the earlier blocks. NOTE: the load bypasses the L1 cache, because the L1
  // cache does not see stores of other SMs.
  __device__ __forceinline__ void load(const BackwardArgs& args, int64_t index) {
    const float4* g_sums = sums_at(args, index);
#pragma unroll
    for (int i = 0; i < kMTiles * kNTiles; ++i) {
      const float4 sums = __ldcg(g_sums + i * kWarp);
      float (&to)[4] = r_sum[i / kNTiles][i % kNTiles];
      to[0] = sums.x, to[1] = sums.y, to[2] = sums.z, to[3] = sums.w;
    }
  }

  // Starts to load the sums if all earlier blocks have already added to them. The caller must call
  // this function before every add(). If `order` is 0, no earlier block adds, and the function
  // loads nothing.
  __device__ __forceinline__ void prefetch(const BackwardArgs& args, const QueryTile& tile,
                                           int order) {
    if constexpr (kPrefetches) {
      clear();  // ends the lifetime of the old values of the registers
      if (order == 0 || (Config::kMasked && order < 0)) return;
      const int64_t i = index(args, tile);
      int added = 0;
      if (threadIdx.x % kWarp == 0) added = load_acquire(args.g_dq_semaphore + i);
      loaded = __shfl_sync(~0u, added, 0) == order;
      if (loaded) load(args, i);
    }
  }

  // Computes dQ += dS K. s_scores holds dS^T (kKeys, kRows), and s_keys holds K (kKeys, kHeadDim).
  // `live` is a SequenceSpan or a BlockMask and gives the keys that the rows see. If
  // `handles_non_finite` is true, K may have inf and NaN.
  template <typename Live>
  __device__ __forceinline__ void add(const BackwardArgs& args, const QueryTile& tile, int order,
                                      const Live& live, uint32_t s_scores, uint32_t s_keys,
                                      bool handles_non_finite) {
    const int64_t i = index(args, tile);
    if (order == 0) {
      if constexpr (!kPrefetches) clear();
    } else if (!loaded) {
      if (threadIdx.x % kWarp == 0) {
        while (load_acquire(args.g_dq_semaphore + i) != order) {
        }
      }
      __syncwarp();
      load(args, i);
    }
    loaded = false;
    const int first_row = tile.index * Config::kRows;
    int last = last_order(args, first_row, live);
    // NOTE: the asm makes the compiler compute `last` before the product. If the compiler computed
    // `last` after the product, the mask's address would occupy registers during the product.
    asm volatile("" : "+r"(last));
    multiply(s_scores, s_keys, handles_non_finite);

    if (last == order) {
      finish(args, tile.head, first_row, live);
      return;
    }
    float4* g_sums = sums_at(args, i);
#pragma unroll
    for (int j = 0; j < kMTiles * kNTiles; ++j) {
      const float (&r)[4] = r_sum[j / kNTiles][j % kNTiles];
      __stcg(g_sums + j * kWarp, make_float4(r[0], r[1], r[2], r[3]));
    }
    must_signal = true;
  }

  // Lets the next block add. Callers call this function some time after add(). The release of the
  // semaphore then waits only a short time for the stores of add().
  // NOTE: under a general mask, `order` differs between query tiles, and no register is free to
  // keep `order`. Therefore the function increments the semaphore instead of storing order + 1. No
  // other block writes to the semaphore at this time.
  __device__ __forceinline__ void signal(const BackwardArgs& args, const QueryTile& tile,
                                         int order) {
    if (!must_signal) return;
    __syncwarp();
    if (threadIdx.x % kWarp == 0) {
      int* g_semaphore = args.g_dq_semaphore + index(args, tile);
      if constexpr (Config::kMasked) {
        increment_release(g_semaphore);
      } else {
        store_release(g_semaphore, order + 1);
      }
    }
    must_signal = false;
  }

 private:
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kMTiles * kNTiles * 4; ++i) {
      r_sum[i / (kNTiles * 4)][i / 4 % kNTiles][i % 4] = 0.f;
    }
  }
  static __device__ __forceinline__ int row_in_tile() {
    return threadIdx.x / kWarp / kWarpsAcross * kSliceRows;
  }
  static __device__ __forceinline__ int col_in_tile() {
    return threadIdx.x / kWarp % kWarpsAcross * kSliceCols;
  }

  __device__ __forceinline__ void multiply(uint32_t s_scores, uint32_t s_keys,
                                           bool handles_non_finite) {
    const uint32_t left = Ops::template mn_left_lane<ScoreTile>(s_scores, row_in_tile());
    const uint32_t right = Ops::template mn_right_lane<KeyTile>(s_keys, col_in_tile());
#pragma unroll Config::kUnroll
    for (int k = 0; k < Config::kKeys; k += Ops::kDepth) {
      typename Ops::Left a[kMTiles];
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        Ops::template load_mn_left<ScoreTile>(a[m], left, k * ScoreTile::kRowBytes, m);
      }
      Ops::template multiply<kGroups, Ops::kMnTiles>(
          a, handles_non_finite,
          [&](typename Ops::Right(&b)[Ops::kMnTiles], int group) {
            Ops::template load_mn_right<KeyTile>(b, right, k * KeyTile::kRowBytes, group);
          },
          [&](int m, int n) -> float (&)[4] { return r_sum[m][n]; });
    }
  }

  static __device__ __forceinline__ int last_order(const BackwardArgs& args, int first_row,
                                                   const SequenceSpan& span) {
    int64_t last_row = first_row + Config::kRows - 1;
    if (last_row >= args.params.mask.seqlen_q) last_row = args.params.mask.seqlen_q - 1;
    const int last_key = static_cast<int>(args.params.mask.row_keys(last_row, span.pad).end) - 1;
    return last_key / Config::kKeys - span.pad / Config::kKeys;
  }
  static __device__ __forceinline__ int last_order(const BackwardArgs&, int,
                                                   const BlockMask& group) {
    return (group.end - 1) / Config::kKeys - group.begin / Config::kKeys;
  }

  __device__ __forceinline__ void finish(const BackwardArgs& args, int64_t head, int first_row,
                                         const SequenceSpan& span) const {
    store(args, head, first_row, span.first_row);
  }
  __device__ __forceinline__ void finish(const BackwardArgs& args, int64_t head, int first_row,
                                         const BlockMask& group) {
    const int row = first_row + row_in_tile() + threadIdx.x % kWarp / 4;
#pragma unroll
    for (int i = 0; i < 2 * kMTiles; ++i) {
      if (group.sees(row + i * 8)) continue;
#pragma unroll
      for (int n = 0; n < kNTiles; ++n) {
        r_sum[i / 2][n][i % 2 * 2] = r_sum[i / 2][n][i % 2 * 2 + 1] = 0.f;
      }
    }
    store(args, head, first_row, 0);
  }

  __device__ __forceinline__ void store(const BackwardArgs& args, int64_t head, int first_row,
                                        int first_live_row) const {
    const int cols = static_cast<int>(args.params.sizes.head_dim);
    const unsigned nheads = static_cast<unsigned>(args.params.sizes.nheads),
                   flat_head = static_cast<unsigned>(head);
    const AttentionOutput& dquery = args.params.dquery;
    T* g_dq = dquery.row<T>(flat_head / nheads, flat_head % nheads, 0);
    store_results<0>(g_dq, dquery.row_stride, r_sum, args.params.scale, first_row + row_in_tile(),
                     first_live_row, static_cast<int>(args.params.mask.seqlen_q), col_in_tile(),
                     cols);
  }
};

}  // namespace torchweld
