// The work tile of a block of attention's decode kernel, and the keys that its rows see.
#pragma once

#include "attention/block.cuh"
#include "core/fast_divide.h"
#include "core/index.h"
#include "core/launch.h"
#include "device/block_flags.cuh"

namespace torchweld {

// The parameters that the host passes to all blocks. Blocks are ordered by kv head, then by split,
// then by tile of rows.
struct DecodePlan {
  FastDivisor row_tiles, splits, nheads_kv, seqlen_q;
  // `heads` is the number of query heads of a kv head. `rows` is the number of query rows of these
  // heads together.
  int heads, rows;
  BlockFlags flags;  // one flag per split, raised when the split has stored its partial results

  static DecodePlan make(const AttentionParams& p) {
    const AttentionSizes& s = p.sizes;
    const int64_t heads = s.nheads / s.nheads_kv, rows = heads * s.seqlen_q;
    return {FastDivisor(divide_up(rows, AttentionDecodeTile::kRows)),
            FastDivisor(p.choice.splits),
            FastDivisor(s.nheads_kv),
            FastDivisor(s.seqlen_q),
            static_cast<int>(heads),
            static_cast<int>(rows),
            {p.flags, next_launch_number()}};
  }

  int64_t blocks(int64_t batch) const {
    return batch * nheads_kv.divisor() * row_tiles.divisor() * splits.divisor();
  }
};

// The work tile of a block.
struct DecodeWork {
  const DecodePlan& plan;
  int64_t group;  // the index of the group, that is, of (batch, kv head, tile of rows)
  int64_t batch, kv_head;
  int split;
  // first_row is the index of the tile's first row among the packed rows of the kv head. `rows` is
  // the number of rows in the tile.
  int first_row, rows;
  // The rows of the tile see only keys of [pad, pad + keys). The row with index i in its head sees
  // the first min(i + shift, keys) of these keys.
  int pad, keys, shift;

  // Finds the group, the split and the rows. The caller must then call find_keys().
  __device__ __forceinline__ explicit DecodeWork(const DecodePlan& plan) : plan(plan) {
    const uint32_t rest = plan.row_tiles.divide(blockIdx.x);
    const uint32_t tile = blockIdx.x - rest * plan.row_tiles.divisor();
    const uint32_t head = plan.splits.divide(rest);
    split = static_cast<int>(rest - head * plan.splits.divisor());
    group = int64_t{head} * plan.row_tiles.divisor() + tile;
    batch = plan.nheads_kv.divide(head);
    kv_head = head - batch * plan.nheads_kv.divisor();
    first_row = static_cast<int>(tile) * AttentionDecodeTile::kRows;
    rows = min(AttentionDecodeTile::kRows, plan.rows - first_row);
  }

  __device__ __forceinline__ void find_keys(const AttentionParams& p) {
    constexpr int kNoLimit = 1 << 30;
    pad = p.mask.pad_32(batch);
    keys = static_cast<int>(p.sizes.seqlen_k) - pad;
    shift = p.mask.causal ? keys - static_cast<int>(p.sizes.seqlen_q) + 1 : kNoLimit;
  }

  // The query head of a packed row of the tile, and the row's index within that head.
  struct Row {
    int64_t head;
    int index;
  };
  __device__ __forceinline__ Row row(int row) const {
    const uint32_t packed = first_row + row, head = plan.seqlen_q.divide(packed);
    return {kv_head * plan.heads + head, static_cast<int>(packed - head * plan.seqlen_q.divisor())};
  }
  // Returns the index of the tile's first row in `lse`. The packed rows are consecutive in `lse`.
  __device__ __forceinline__ int64_t first_lse_row(const AttentionSizes& sizes) const {
    return (batch * sizes.nheads + kv_head * plan.heads) * sizes.seqlen_q + first_row;
  }

  // Returns the range of keys of this split, as indices that count from `pad`. The range consists
  // of whole tiles, but the last tile of the sequence may have fewer keys.
  __device__ __forceinline__ KeyRange32 split_keys(int tile_keys) const {
    const int tiles = (keys + tile_keys - 1) / tile_keys;
    const int each = static_cast<int>(plan.splits.divide(tiles));
    const int more =
        // The number of splits that have one tile more than the other splits.
        tiles - each * static_cast<int>(plan.splits.divisor());
    const int first = each * split + min(split, more), last = first + each + (split < more);
    return {first * tile_keys, min(last * tile_keys, keys)};
  }
};

using DecodeGaps = GapKeys<kWarp>;
static_assert(AttentionDecodeTile::kMaxSeqlenQ <= kWarp);

// The work tile under a general mask. Every key of [pad, pad + keys) lies in a gap (GapKeys) or is
// seen by some row of the block. Each lane holds the key range of one row, as indices that count
// from `pad`.
struct MaskedDecodeWork : DecodeWork {
  // The range of keys that this lane's row sees; kSeesNothing and 0 if the row sees no key.
  int begin, end;
  int last_begin, first_end;  // every row that sees a key sees all keys of [last_begin, first_end)

  using DecodeWork::DecodeWork;
  __device__ __forceinline__ void find_keys(const AttentionParams& p) {
    const int lane = threadIdx.x % kWarp;
    KeyRange live = {0, 0};
    const MaskParams mask = p.mask;
    if (lane < rows) live = mask.row_keys(row(lane).index, mask.sequence(batch));
    const bool sees = !live.empty();
    const int last = __reduce_max_sync(~0u, sees ? static_cast<int>(live.end) : 0);
    const int first = __reduce_min_sync(~0u, sees ? static_cast<int>(live.begin) : kSeesNothing);
    pad = last > 0 ? first : 0;
    keys = last - pad;
    begin = sees ? static_cast<int>(live.begin) - pad : kSeesNothing;
    end = sees ? static_cast<int>(live.end) - pad : 0;
    last_begin = __reduce_max_sync(~0u, sees ? begin : 0);
    first_end = __reduce_min_sync(~0u, sees ? end : INT_MAX);
  }

  // Finds the gaps between the keys (GapKeys). One warp calls this function. The tile may hold rows
  // of several heads, so bit i of s_gaps.rows stands for row i of every head.
  __device__ __forceinline__ void find_gaps(const AttentionParams& p, DecodeGaps& s_gaps) const {
    const int lane = threadIdx.x % kWarp;
    const MaskParams mask = p.mask;
    uint32_t bits = 0;
    int position = 0;
    if (mask.may_have_gaps()) {
      position = static_cast<int>(mask.position(0, mask.sequence(batch).end)) - pad;
      const int index = row(lane).index, key = position + index;
      bool gap = lane < rows && end == 0 && key > 0 && key < keys;
      if (__any_sync(~0u, gap)) {
        for (int i = 0; i < AttentionDecodeTile::kRows; ++i) {
          const int row_begin = __shfl_sync(~0u, begin, i), row_end = __shfl_sync(~0u, end, i);
          gap = gap && (key < row_begin || key >= row_end);
        }
        bits = __reduce_or_sync(~0u, gap ? 1u << index : 0u);
      }
    }
    if (lane == 0) s_gaps = {bits != 0 ? position : kSeesNothing, {bits}};
  }
};

// The keys that the rows in a thread's fragments see.
template <int kTiles, bool kMasked>
struct DecodeFragmentKeys {
  // The first key that each row sees. It is only used if kMasked is true. Otherwise every row sees
  // the keys from 0 on.
  int begins[kTiles][2];
  int ends[kTiles][2];
  int all_begin, all_end;  // every row that sees a key sees all keys of [all_begin, all_end)

  __device__ __forceinline__ DecodeFragmentKeys(const AttentionParams& p, const DecodeWork& work)
      : all_begin(0), all_end(p.mask.causal ? work.shift : work.keys) {
    static_assert(!kMasked);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = work.row(tile * 16 + half * 8 + threadIdx.x % kWarp / 4).index;
        ends[tile][half] = min(row + work.shift, work.keys);
      }
    }
  }

  __device__ __forceinline__ DecodeFragmentKeys(const AttentionParams&,
                                                const MaskedDecodeWork& work)
      : all_begin(work.last_begin), all_end(work.first_end) {
    static_assert(kMasked);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = tile * 16 + half * 8 + threadIdx.x % kWarp / 4;
        begins[tile][half] = __shfl_sync(~0u, work.begin, row);
        ends[tile][half] = __shfl_sync(~0u, work.end, row);
      }
    }
  }

  // Hides the keys that a row does not see. r_s holds the scores of the keys from `key` on.
  template <int kCols>
  __device__ __forceinline__ void hide_others(float (&r_s)[kTiles][kCols][4], int key) const {
    if ((!kMasked || key >= all_begin) && key + kCols * 8 <= all_end) return;
    const int first = key + threadIdx.x % 4 * 2;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int j = 0; j < kCols; ++j) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& score = r_s[tile][j][2 * half + i];
            const int score_key = first + j * 8 + i;
            bool sees = score_key < ends[tile][half];
            if constexpr (kMasked) sees = score_key >= begins[tile][half] && sees;
            score = sees ? score : -INFINITY;
          }
        }
      }
    }
  }
};

// The ALiBi slopes of the rows in a thread's fragments, in units of the scores, and the positions
// of the rows among the work tile's keys.
template <int kTiles>
struct DecodeFragmentAlibi {
  float slopes[kTiles][2];
  int positions[kTiles][2];

  __device__ __forceinline__ DecodeFragmentAlibi(const AttentionParams& p, const DecodeWork& work,
                                                 const ScoreScale& scale) {
    const MaskParams& mask = p.mask;
    const int first = static_cast<int>(mask.position(0, mask.sequence(work.batch).end)) - work.pad;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int index = tile * 16 + half * 8 + threadIdx.x % kWarp / 4;
        const DecodeWork::Row row = work.row(min(index, work.rows - 1));
        slopes[tile][half] = mask.alibi_slope(row.head) / scale.size;
        positions[tile][half] = first + row.index;
      }
    }
  }

  // Subtracts the distances times the slopes from the scores r_s of the keys from `key` on.
  template <int kCols>
  __device__ __forceinline__ void add_to(float (&r_s)[kTiles][kCols][4], int key) const {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int first = key + threadIdx.x % 4 * 2 - positions[tile][half];
#pragma unroll
        for (int j = 0; j < kCols; ++j) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            r_s[tile][j][2 * half + i] -=
                slopes[tile][half] * fabsf(static_cast<float>(first + j * 8 + i));
          }
        }
      }
    }
  }
};

}  // namespace torchweld
