// The forward of attention on tensor cores, in 16 bits and TF32:
//   out = softmax(scale * Q K^T) V, lse = log sum exp
//   Q (seqlen_q, head_dim), K (seqlen_k, head_dim), V (seqlen_k, head_dim_v) of each batch and head
//
// A block has kRows query rows of one head. It loops over the keys that any of these rows sees,
// kKeys keys at a time. A warp has kRows / 4 rows. It computes the scores of its rows, converts the
// scores to probabilities relative to a running maximum, and multiplies the probabilities by V.
// Scores and probabilities stay in registers. During a step of the loop, the keys and values of the
// next step arrive.
//
// Without a general mask, the loop starts with the first key that is not padding, so only the last
// steps need a mask. Under a general mask, the loop runs from the first to the last key that any of
// the rows sees, and its first steps need a mask, too. The soft cap is applied before the mask. A
// sink is added to the sum of a row after the loop.
//
// Blocks are ordered by the section of their head (AttentionSchedule). In a section, the blocks
// with the longest rows come first. The keys and values of a section fit in the L2 cache.
// Source: Dao, "FlashAttention-2", 2023.
#pragma once

#include <type_traits>

#include "attention/block.cuh"
#include "attention/sync/warp_16bit.cuh"
#include "attention/sync/warp_tf32.cuh"
#include "device/dispatch.cuh"

namespace torchweld {

template <typename T_, int kTile, bool kMasked>
struct AttentionConfig : AttentionVariant<kMasked> {
  using T = T_;
  static constexpr AttentionTile kShape = kAttentionTiles[kTile];
  static constexpr int kThreads = kShape.threads();
  static constexpr int kDim = kShape.dim;
  static constexpr int kRows = kShape.rows;
  static constexpr int kKeys = kShape.keys;
  static constexpr int kStages = kShape.stages;
  static constexpr int kWarpRows = kRows / (kThreads / 32);
  static constexpr int kTiles = kWarpRows / 16;
  static constexpr int kBlocksPerSm = kShape.blocks_per_sm;
  using Block = AttentionBlockOf<kMasked, kRows, kWarpRows>;
  using Layout = AttentionLayout<T, kDim>;
  using Matmul = std::conditional_t<sizeof(T) == 2, WarpMatmul16<T, kDim, kTiles, kKeys>,
                                    WarpMatmulTf32<kDim, kTiles, kKeys>>;
  static_assert(kWarpRows % 16 == 0 && kKeys % 16 == 0 && (kStages == 1 || kStages == 2));
};

// NOTE: `block` is in shared memory, because the loop has no free registers and rarely needs the
// values in `block`.
template <typename Config>
struct AttentionShared {
  static constexpr int kDim = Config::kDim;
  typename Config::T query[Config::kRows * kDim];
  typename Config::T key[Config::kStages][Config::kKeys * kDim];
  typename Config::T value[Config::kStages][Config::kKeys * kDim];
  typename Config::Block block;
};

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, Config::kBlocksPerSm) void attention_kernel(
    const AttentionParams params, const AttentionSchedule schedule,
    const typename Config::Scale scale) {
  using T = typename Config::T;
  using Layout = typename Config::Layout;
  using Matmul = typename Config::Matmul;
  constexpr int kRows = Config::kRows, kKeys = Config::kKeys, kTiles = Config::kTiles;
  constexpr int kStages = Config::kStages;
  extern __shared__ __align__(1024) char s_bytes[];
  auto& s = *reinterpret_cast<AttentionShared<Config>*>(s_bytes);

  if constexpr (Config::kMasked) {
    s.block.init(params, schedule);
    if (s.block.rows == 0) return;
  } else {
    if (threadIdx.x == 0) s.block = AttentionBlock::make<kRows>(params, schedule);
    __syncthreads();
  }
  const AttentionBlock block = s.block;
  const int keys = block.keys;

  const int64_t kv_head = block.head / (params.sizes.nheads / params.sizes.nheads_kv);
  const int head_dim = static_cast<int>(params.sizes.head_dim);
  const int head_dim_v = static_cast<int>(params.sizes.head_dim_v);
  AttentionLoader<Layout, kKeys, Config::kThreads> load_key(
      matrix_of<T>(params.key, block.batch, kv_head, block.pad), params.key.row_stride, head_dim);
  AttentionLoader<Layout, kKeys, Config::kThreads> load_value(
      matrix_of<T>(params.value, block.batch, kv_head, block.pad), params.value.row_stride,
      head_dim_v);
  const auto load_step = [&](int thread, int stage, int keys_left) {
    load_key.load(thread, shared_address(s.key[stage]), keys_left);
    load_value.load(thread, shared_address(s.value[stage]), keys_left);
    copy_async_commit();
  };

  // Load Q and multiply it by the sign of the scale. The absolute value of the scale is part of the
  // exponent.
  if (keys > 0) {
    AttentionLoader<Layout, kRows, Config::kThreads> load_query(
        matrix_of<T>(params.query, block.batch, block.head, block.first_row),
        params.query.row_stride, head_dim);
    load_query.load(threadIdx.x, shared_address(s.query), block.rows);
    copy_async_commit();
    if (scale.sign != 1.f) {
      copy_async_wait<0>();
      load_query.multiply(reinterpret_cast<char*>(s.query), scale.sign);
    }
    if (kStages == 2) load_step(threadIdx.x, 0, keys);
  }

  typename Matmul::Out r_out = {};
  OnlineRow rows[kTiles][2];
  start(rows);
  int stage = 0;
  for (int key = 0; key < keys; key += kKeys) {
    const int thread = fresh_thread();
    if (kStages == 1) {
      if (key > 0) __syncthreads();
      load_step(thread, 0, keys - key);
    }
    copy_async_wait<0>();
    if constexpr (Config::kMasked) {
      load_value.clear_gaps(thread, s.value[stage], FirstKeys{s.block.unseen}, key);
      load_value.clear_gaps(thread, s.value[stage], s.block.gaps, key);
    }
    __syncthreads();
    if (kStages == 2 && key + kKeys < keys) load_step(thread, stage ^ 1, keys - key - kKeys);
    const int warp_row = thread / 32 * Config::kWarpRows;
    [[maybe_unused]] const int first_row = s.block.first_row + warp_row;
    const Matmul matmul(thread % 32, warp_row);
    typename Matmul::Scores r_s = {};
    matmul.scores(r_s, reinterpret_cast<const char*>(s.query),
                  reinterpret_cast<const char*>(s.key[stage]), head_dim);
    if constexpr (Config::kMasked) {
      mask_scores<Config>(r_s, scale, s.block, warp_row, key);
    } else if (key + kKeys > s.block.end_of(first_row)) {
      hide_columns(r_s, first_row + s.block.shift - key, s.block.all_keys - key);
    }
    float factor[kTiles][2];
    online_softmax<Matmul::kFtz>(r_s, rows, factor, scale.c);
    rescale(r_out, factor);
    matmul.attend(r_out, r_s, reinterpret_cast<const char*>(s.value[stage]), head_dim_v);
    if (kStages == 2) stage ^= 1;
  }

  // Store the results through shared memory. The results overwrite the warp's query rows, which are
  // no longer needed.
  __syncwarp();
  const int warp_row = threadIdx.x / 32 * Config::kWarpRows;
  store_block<Config>(params, scale, s.block,
                      reinterpret_cast<char*>(s.query + warp_row * Config::kDim), rows, r_out);
}

// `tile` is an index into kAttentionTiles. The math of this tile must be kMath.
template <typename T, AttentionMath kMath, bool kMasked>
void launch_attention_tiles(int tile, const AttentionParams& params, cudaStream_t stream) {
  dispatch_index<kNumAttentionTiles>(tile, [&](auto index) {
    if constexpr (kAttentionTiles[index.value].math == kMath) {
      using Config = AttentionConfig<T, index.value, kMasked>;
      launch_attention_blocks<Config, sizeof(AttentionShared<Config>)>(attention_kernel<Config>,
                                                                       params, stream);
    }
  });
}

}  // namespace torchweld
