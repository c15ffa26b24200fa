// The tensor-core kernels of attention's forward share this code: the work tile of a block, the
// epilogue and the launch.
#pragma once

#include <type_traits>

#include "attention/config.h"
#include "attention/fwd.h"
#include "attention/gap_keys.cuh"
#include "attention/softmax.cuh"
#include "attention/tile.cuh"
#include "core/launch.h"

namespace torchweld {

// The work tile of a block. It has query rows [first_row, first_row + rows) of one head, and keys
// [pad, pad + keys) of the sequence. Each of these keys is seen by at least one of these rows. All
// other key indices in this struct count from `pad`, the end of the padding. Row i of the head sees
// the keys with an index below min(i + shift, all_keys).
struct AttentionBlock {
  int64_t batch;
  int64_t head;
  int first_row;
  int rows;
  int pad;
  int keys;
  int shift;
  int all_keys;
  int first_live;  // rows of the head before this row are padding or see no key

  // Finds the rows of this block's work tile. The caller must then call find_keys().
  template <int kRows>
  static __device__ __forceinline__ AttentionBlock find_rows(const AttentionParams& params,
                                                             const AttentionSchedule& schedule) {
    const int64_t index = schedule.first_block + blockIdx.x;
    const int64_t section = index / (schedule.section * schedule.tiles) * schedule.section;
    const int64_t in_section = index - section * schedule.tiles;
    const int64_t width = min(schedule.section, params.sizes.batch * params.sizes.nheads - section);
    const int64_t tile = in_section / width, row = section + in_section % width;
    AttentionBlock block;
    block.batch = row / params.sizes.nheads;
    block.head = row % params.sizes.nheads;
    block.first_row = static_cast<int>(schedule.tiles - 1 - tile) * kRows;
    block.rows = min(static_cast<int>(params.sizes.seqlen_q) - block.first_row, kRows);
    return block;
  }

  template <int kRows>
  static __device__ __forceinline__ AttentionBlock make(const AttentionParams& params,
                                                        const AttentionSchedule& schedule) {
    AttentionBlock block = find_rows<kRows>(params, schedule);
    block.find_keys(params);
    return block;
  }

  __device__ __forceinline__ void find_keys(const AttentionParams& params) {
    const MaskParams mask = params.mask;
    const int seqlen_q = static_cast<int>(mask.seqlen_q);
    const int seqlen_k = static_cast<int>(mask.seqlen_k);
    pad = mask.pad_32(batch);
    all_keys = seqlen_k - pad;
    shift = mask.causal ? all_keys - seqlen_q + 1 : kNoLimit;
    first_live = mask.causal || mask.leftpad ? seqlen_q - all_keys : 0;
    const bool padding = first_row + rows <= mask.first_row(pad);
    keys = padding ? 0 : max(end_of(first_row + rows - 1), 0);
    if (keys == 0) first_live = seqlen_q;
  }

  __device__ __forceinline__ int end_of(int row) const { return min(row + shift, all_keys); }

 protected:
  static constexpr int kNoLimit = 1 << 30;
};

// The work tile under a general mask. Key indices count from `pad`, which is a multiple of
// kPadMultiple, or lies a multiple of AttentionParams::key_grid behind the padding. With such a
// grid, a work tile is processed in parts, each with the rows of one document. A row of the block
// sees the keys [begin[row], end[row]), and no row sees the first `unseen` keys.
// last_begin[warp] is the largest `begin` of the warp's kWarpRows rows, and first_end[warp] is the
// smallest `end` of these rows. Every row of the warp that sees any key sees all keys of
// [last_begin[warp], first_end[warp]).
template <int kRows, int kWarpRows, int kPadMultiple = 1>
struct MaskedAttentionBlock : AttentionBlock {
  int unseen;
  int end_row;  // the end of the rows of the whole work tile; only find_keys() sets it
  int last_begin[kRows / kWarpRows];  // last_begin and first_end leave out rows that see no key
  int first_end[kRows / kWarpRows];
  alignas(16) int begin[kRows];  // kSeesNothing if a row sees no key
  alignas(16) int end[kRows];    // 0 if a row sees no key
  GapKeys<kRows> gaps;

  // Finds part blockIdx.y of the work tile. If there is no such part, `rows` is 0. All threads call
  // this function. The block must have at least kRows threads.
  __device__ __forceinline__ void init(const AttentionParams& params,
                                       const AttentionSchedule& schedule) {
    static_assert(kPadMultiple == 1);
    const int row = threadIdx.x;
    if (row == 0) {
      static_cast<AttentionBlock&>(*this) = find_rows<kRows>(params, schedule);
      pad = unseen = kSeesNothing;
      all_keys = 0;
    }
    if (row < kRows / kWarpRows) last_begin[row] = 0, first_end[row] = INT_MAX;
    __syncthreads();
    const MaskParams mask = params.mask;
    const SequenceMask sequence = mask.sequence(batch);
    if (has_parts(params)) find_part(params, row, blockIdx.y);
    KeyRange live = {0, 0};
    if (row < rows) live = mask.row_keys(first_row + row, sequence);
    const bool sees = !live.empty();
    if (sees) {
      atomicMin(&pad, static_cast<int>(live.begin));
      atomicMax(&all_keys, static_cast<int>(live.end));
      atomicMin(&unseen, sequence.key_start ? sequence.key_start[first_row + row] : 0);
    }
    __syncthreads();
    const int seen = all_keys > 0 ? pad : 0, last = all_keys;
    const int origin = max(static_cast<int>(sequence.pad), unseen);
    const int before_first = last > 0 ? (seen - origin) % params.key_grid : 0;
    const int first = seen - before_first;
    __syncthreads();
    const int own_begin = static_cast<int>(live.begin) - first;
    const int own_end = static_cast<int>(live.end) - first;
    if (row < kRows) {
      begin[row] = sees ? own_begin : kSeesNothing;
      end[row] = sees ? own_end : 0;
    }
    if (sees) {
      atomicMax(&last_begin[row / kWarpRows], own_begin);
      atomicMin(&first_end[row / kWarpRows], own_end);
    }
    if (row == 0) {
      unseen = before_first;
      set_keys(mask, static_cast<int>(sequence.end), first, last);
    }
    __syncthreads();
    if (mask.may_have_gaps()) {
      find_gaps(row, kRows);
      __syncthreads();
    }
  }

  __device__ __forceinline__ bool has_next_part() const { return first_row + rows < end_row; }

  // Whether work tiles may have parts.
  static bool TW_HOST_DEVICE has_parts(const AttentionParams& params) {
    return params.key_grid > 1 && params.mask.key_start != nullptr;
  }
  // Finds the first part of the rows of `block`, the keys that these rows see, and whether these
  // keys may have gaps. All lanes of one warp call this function. A kernel without parts passes
  // kParts = false.
  template <bool kParts = true>
  __device__ __forceinline__ void find_keys(const AttentionParams& params,
                                            const AttentionBlock& block) {
    const MaskParams mask = params.mask;
    const SequenceMask32 sequence = mask.sequence<int>(block.batch);
    const int lane = threadIdx.x % 32;
    // NOTE: the code below reads the block from shared memory, because few registers are free.
    if (lane == 0) {
      static_cast<AttentionBlock&>(*this) = block;
      if (kParts) end_row = block.first_row + block.rows;
    }
    __syncwarp();
    if (kParts && has_parts(params)) {
      int part_rows = rows;
      for (int row = lane; row < part_rows; row += 32) {
        if (part_starts(params)[row] != part_starts(params)[0]) part_rows = row;
      }
      part_rows = __reduce_min_sync(~0u, part_rows);
      if (lane == 0) rows = part_rows;
      __syncwarp();
    }
    // A lane has kLaneRows consecutive rows, so the kWarpRows rows of a warp are in neighbouring
    // lanes.
    constexpr int kLaneRows = kRows <= 64 ? 2 : kRows <= 128 ? 4 : 8;
    constexpr int kWarpLanes = kWarpRows / kLaneRows, kStep = kLaneRows <= 4 ? kLaneRows : 1;
    static_assert(kRows % kLaneRows == 0 && kRows <= 32 * kLaneRows);
    // Lanes without rows of their own process the last kLaneRows rows, too.
    const int lane_row = min(lane * kLaneRows, kRows - kLaneRows), last_row = rows - 1;
    const int first_pos = mask.position(first_row, sequence.end);
    int first = kSeesNothing, last = 0, first_start = kSeesNothing;
    int begins[kStep], ends[kStep];
#pragma unroll 1
    for (int step = 0; step < kLaneRows; step += kStep) {
      const int row = lane_row + step;
      const auto load = [&](int (&values)[kStep], const int32_t* g_values) {
#pragma unroll
        for (int i = 0; i < kStep; ++i) values[i] = g_values[first_row + min(row + i, last_row)];
      };
      int starts[kStep], positions[kStep];
#pragma unroll
      for (int i = 0; i < kStep; ++i) starts[i] = 0, positions[i] = first_pos + row + i;
      if (sequence.key_start) load(starts, sequence.key_start);
      if (sequence.row_ends) {
        load(positions, sequence.row_ends);
#pragma unroll
        for (int& pos : positions) pos = min(max(pos, 0), static_cast<int>(mask.seqlen_k)) - 1;
      }
#pragma unroll
      for (int i = 0; i < kStep; ++i) {
        const KeyRange32 live = mask.row_keys_32(positions[i], starts[i], sequence);
        const bool sees = row + i <= last_row && !live.empty();
        begins[i] = sees ? live.begin : kSeesNothing;
        ends[i] = sees ? live.end : 0;
        first = min(first, begins[i]);
        last = max(last, ends[i]);
        first_start = min(first_start, sees ? starts[i] : kSeesNothing);
        if constexpr (kStep < kLaneRows) begin[row + i] = begins[i], end[row + i] = ends[i];
      }
    }
    first = __reduce_min_sync(~0u, first);
    last = __reduce_max_sync(~0u, last);
    if (last == 0) first = 0;
    first_start = __reduce_min_sync(~0u, first_start);
    const int origin =
        kPadMultiple > 1 || last == 0 ? 0 : max(static_cast<int>(sequence.pad), first_start);
    const int before_first = (first - origin) % max(kPadMultiple, params.key_grid);
    first -= before_first;
    if (lane == 0) {
      unseen = before_first;
      set_keys(mask, sequence.end, first, last);
    }
    int max_begin = 0, min_end = INT_MAX;
    bool may_have = false;
#pragma unroll 1
    for (int step = 0; step < kLaneRows; step += kStep) {
      if constexpr (kStep < kLaneRows) {
#pragma unroll
        for (int i = 0; i < kStep; ++i) {
          begins[i] = begin[lane_row + step + i];
          ends[i] = end[lane_row + step + i];
        }
        __syncwarp();  // lanes without rows of their own read what another lane writes
      }
#pragma unroll
      for (int i = 0; i < kStep; ++i) {
        const int row = lane_row + step + i;
        const bool sees = ends[i] != 0;
        const int key = first_pos + row - first;
        may_have |= !sees && key > 0 && key < last - first;
        begin[row] = sees ? begins[i] - first : kSeesNothing;
        end[row] = sees ? ends[i] - first : 0;
        max_begin = max(max_begin, sees ? begins[i] - first : 0);
        min_end = min(min_end, sees ? ends[i] - first : INT_MAX);
      }
    }
#pragma unroll
    for (int lanes = 1; lanes < kWarpLanes; lanes *= 2) {
      max_begin = max(max_begin, __shfl_xor_sync(~0u, max_begin, lanes));
      min_end = min(min_end, __shfl_xor_sync(~0u, min_end, lanes));
    }
    if (lane % kWarpLanes == 0 && lane * kLaneRows < kRows) {
      last_begin[lane_row / kWarpRows] = max_begin;
      first_end[lane_row / kWarpRows] = min_end;
    }
    __syncwarp();
    if (mask.may_have_gaps()) {
      if (__any_sync(~0u, may_have) && lane == 0) gaps.first_position = first_position();
      __syncwarp();
    }
  }

  // Returns whether the caller must call find_gaps(). The result is valid after find_keys().
  __device__ __forceinline__ bool may_have_gaps() const {
    return gaps.first_position != kSeesNothing;
  }
  // Finds the gaps between the keys (GapKeys). The `threads` threads that call this function
  // together form whole warps.
  __device__ __forceinline__ void find_gaps(int thread, int threads) {
    gaps.find(begin, first_position(), 0, keys, thread, threads);
  }

 private:
  // Returns the address of the key_start of the first row. A part has rows with one key_start.
  __device__ __forceinline__ const int32_t* part_starts(const AttentionParams& params) const {
    return params.mask.key_start + batch * params.mask.seqlen_q + first_row;
  }

  // Reduces the rows to those of part `part`. All threads call this function. Thread `row` has row
  // `row`.
  __device__ __forceinline__ void find_part(const AttentionParams& params, int row, int part) {
    const int32_t* g_start = part_starts(params) + row;
    const bool starts = row > 0 && row < rows && g_start[0] != g_start[-1];
    const unsigned bits = __ballot_sync(~0u, starts);
    if (row % kWarp == 0 && row < kRows) gaps.rows[row / kWarp] = bits;
    __syncthreads();
    int before = __popc(bits & ((2u << row % kWarp) - 1));  // the parts before that of this row
    for (int i = 0; i < row / kWarp && i < kRows / kWarp; ++i) before += __popc(gaps.rows[i]);
    const bool is_in_part = row < rows && before == part;
    const int begin = first_row, part_rows = __syncthreads_count(is_in_part);
    if (is_in_part && (starts || row == 0)) first_row = begin + row;
    if (row == 0) rows = part_rows;
    __syncthreads();
  }

  // Returns the index of the key at the position of the first row. Only valid under `causal`.
  __device__ __forceinline__ int first_position() const { return first_row + shift - 1; }

  __device__ __forceinline__ void set_keys(const MaskParams& mask, int sequence_end, int first,
                                           int last) {
    pad = first;
    keys = last - first;
    // `shift` is only valid if the rows share a key_end. No code reads all_keys from here on,
    // because each row has its own end.
    shift = mask.position(0, sequence_end) - first + 1;
    gaps.first_position = kSeesNothing;
  }
};

template <bool kMasked, int kRows, int kWarpRows>
using AttentionBlockOf =
    std::conditional_t<kMasked, MaskedAttentionBlock<kRows, kWarpRows>, AttentionBlock>;

// Returns whether the mask hides one of the keys [key, key + kKeys) from a row of the warp. Rows
// that see no key at all don't count. Only used under a general mask.
template <typename Config>
__device__ __forceinline__ bool hides_keys(const typename Config::Block& s_block, int warp_row,
                                           int key) {
  const int warp = warp_row / Config::kWarpRows;
  return key + Config::kKeys > s_block.first_end[warp] || key < s_block.last_begin[warp];
}

// Applies the mask to the scores of a warp's rows, or to values computed from these scores.
template <typename Config, int kTiles, int kColTiles>
__device__ __forceinline__ void hide_keys(float (&r_s)[kTiles][kColTiles][4],
                                          const typename Config::Block& s_block, int warp_row,
                                          int key) {
  hide_columns(r_s, s_block.begin + warp_row, s_block.end + warp_row, key);
}

// Applies the soft cap and the mask to the scores of a warp's rows.
template <typename Config, int kTiles, int kColTiles>
__device__ __forceinline__ void mask_scores(float (&r_s)[kTiles][kColTiles][4],
                                            const CappedScale& scale,
                                            const typename Config::Block& s_block, int warp_row,
                                            int key) {
  if (scale.softcap > 0.f) cap_scores<sizeof(typename Config::T) == 4>(r_s, scale.cap);
  if (hides_keys<Config>(s_block, warp_row, key)) hide_keys<Config>(r_s, s_block, warp_row, key);
}

template <typename T>
__device__ __forceinline__ const T* matrix_of(const AttentionTensor& tensor, int64_t batch,
                                              int64_t head, int64_t row) {
  return static_cast<const T*>(tensor.data) + batch * tensor.batch_stride +
         head * tensor.head_stride + row * tensor.row_stride;
}

// Normalises the sums `r_out` of a warp's rows. Writes the results and the lse of the rows. s_rows
// is shared memory that only this warp uses.
template <typename Config, int kTiles, int kColTiles>
__device__ __forceinline__ void store_block(const AttentionParams& params,
                                            const typename Config::Scale& scale,
                                            const typename Config::Block& s_block, char* s_rows,
                                            const OnlineRow (&rows)[kTiles][2],
                                            const float (&r_out)[kTiles][kColTiles][4]) {
  using T = typename Config::T;
  const int warp_row = threadIdx.x / 32 * Config::kWarpRows;
  const int head_dim_v = static_cast<int>(params.sizes.head_dim_v);
  const int first_row = s_block.first_row + warp_row;
  const int warp_rows = s_block.rows - warp_row;
  const int64_t lse_row =
      (s_block.batch * params.sizes.nheads + s_block.head) * params.mask.seqlen_q + first_row;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = tile * 16 + half * 8 + threadIdx.x % 32 / 4;
      const float sum = quad_sum(rows[tile][half].sum);
      if constexpr (Config::kMasked) {
        const float sink = params.mask.sink ? params.mask.sink[s_block.head] : -INFINITY;
        const bool live = s_block.begin[warp_row + row] != kSeesNothing;
        const FinishedRow finished = finish_row(scale, rows[tile][half].max, sum, sink);
        Config::Matmul::stage(s_rows, r_out, tile, half, finished.factor, live);
        if (params.lse && threadIdx.x % 4 == 0 && row < warp_rows) {
          params.lse[lse_row + row] = live ? finished.lse : sink;
        }
      } else {
        const bool live = !params.mask.row_keys(first_row + row, s_block.pad).empty();
        Config::Matmul::stage(s_rows, r_out, tile, half, 1.f / sum, live);
        if (params.lse && threadIdx.x % 4 == 0 && row < warp_rows) {
          params.lse[lse_row + row] = live ? scale.lse(rows[tile][half].max, sum) : -INFINITY;
        }
      }
    }
  }
  __syncwarp();
  store_rows<typename Config::Layout, Config::kWarpRows>(
      params.out.row<T>(s_block.batch, s_block.head, first_row), params.out.row_stride, s_rows,
      warp_rows, head_dim_v);
}

// Launches the kernel of a tile in one or more grids of at most kMaxGrid blocks each.
template <typename Config, int kBytes, typename Kernel>
void launch_attention_blocks(Kernel kernel, const AttentionParams& params, cudaStream_t stream) {
  // Shared memory holds the buffers of the tile, then the AttentionBlock.
  constexpr int kBlockBytes = Config::kMasked ? 128 + 8 * Config::kRows : 128;
  static_assert(kBytes > Config::kShape.tile_bytes() &&
                kBytes <= Config::kShape.tile_bytes() + kBlockBytes);
  static_assert(kBytes <= kAttentionSharedBytes);
  AttentionSchedule schedule(params, Config::kRows, sizeof(typename Config::T));
  for_each_grid_of(schedule.blocks(params), [&](int64_t first, int64_t blocks) {
    schedule.first_block = first;
    Grid grid(blocks, Config::kThreads, kBytes);
    // The number of parts is not known here, but there is at most one for each row.
    if constexpr (Config::kMasked) {
      if (Config::Block::has_parts(params)) grid.blocks.y = Config::kRows;
    }
    launch_kernel(kernel, grid, stream, params, schedule, Config::scale(params));
  });
}

}  // namespace torchweld
