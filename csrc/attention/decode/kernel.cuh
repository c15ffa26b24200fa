// The forward of attention for few query rows, as in a decode step. The kernel takes about as long
// as one read of all keys and values.
//
// The rows of the query heads that share a kv head are packed into tiles of kRows rows. The keys of
// a sequence, without its padding, are divided into equal splits, so that every SM has a block. The
// warps of a block alternate over the tiles of the block's split. Each warp fills its own ring of
// kStages buffers with cp.async, so no warp waits for another. At the end the block adds up the
// sums of its warps in shared memory. The block of the last split then waits for the blocks of the
// other splits and adds their sums from global memory. It adds them in a fixed order, so every run
// gives the same bits.
//
// The warps of a block read the same two streams, one of keys and one of values. Separate ranges of
// keys for the warps would give less memory throughput. With separate ranges, attention decode
// (batch 16, 32 heads, 8 kv heads, seqlen_k 8192, head_dim 128) in bfloat16 took 141 us instead of
// 134 us, and (1, 32, 8, 65536, 128) took 76 us instead of 72 us.
//
// On Hopper the kernel starts while the previous kernel ends (PDL). When the kernel has read its
// keys, it lets the next kernel start. Two other schedules did not help:
//   The kernel lets the next kernel start earlier. (16, 12, 12, 1024, 64) took 17.5 us with this
//   schedule and 16.8 us without PDL.
//   Before the previous kernel ends, the kernel prefetches keys to L2. This slows the previous
//   kernel down. Two prefetched tiles per warp gained nothing. With 16 prefetched tiles per warp,
//   (64, 32, 8, 2048, 128) took 205 us instead of 137 us.
//
// A set flag means that the partial results of a split are stored. The block that waits for a flag
// also clears it, so flags need no reset before a launch. Counters would need a reset, which cost
// up to 4 us per call in a captured graph.
// Source: Dao et al., "Flash-Decoding for long-context inference", 2023.
#pragma once

#include "attention/decode/sums.cuh"
#include "attention/sync/warp_16bit.cuh"
#include "device/dispatch.cuh"
#include "device/sm90/dependent_launch.cuh"

namespace torchweld {

template <typename T_, int kTile, bool kMasked>
struct AttentionDecodeConfig : AttentionVariant<kMasked> {
  using T = T_;
  static constexpr AttentionDecodeTile kShape = kAttentionDecodeTiles[kTile];
  static constexpr int kDim = kShape.dim, kRows = AttentionDecodeTile::kRows, kKeys = kShape.keys;
  static constexpr int kStages = kShape.stages, kWarps = kShape.warps;
  static constexpr int kThreads = kShape.threads(), kTiles = kRows / 16;
  // The number of blocks per SM. It limits the registers per thread. Shared memory has space for
  // this number of blocks.
  static constexpr int kBlocksPerSm = kShape.tile_bytes() > 110 * 1024 ? 1 : 2;
  using Layout = AttentionLayout<T, kDim>;
  using Matmul = WarpMatmul16<T, kDim, kTiles, kKeys>;
  using Work = std::conditional_t<kMasked, MaskedDecodeWork, DecodeWork>;
  using FragmentKeys = DecodeFragmentKeys<kTiles, kMasked>;

  struct Shared {
    T query[kRows * kDim];
    union {
      // rings[..][0] holds keys, and rings[..][1] holds values.
      T rings[kWarps][kStages][2][kKeys * kDim];
      DecodeSumsShared<kRows, kDim, kWarps> sums;
    };
    // The maximum and the sum of each row in each warp. The factor that rescales the row's sums of
    // the warp later overwrites the maximum.
    MaxSum warp_sums[kWarps][kRows];
    MaxSum block_sums[kRows];
    float factor[kRows];  // normalises the sums of a row; negative if the row sees no key
    DecodeGaps gaps;      // only used under a general mask
  };
};

template <typename Config>
__device__ __forceinline__ void load_decode_query(const AttentionParams& p, const DecodeWork& work,
                                                  float sign, typename Config::T* s_query) {
  using T = typename Config::T;
  using Layout = typename Config::Layout;
#pragma unroll 1
  for (int i = threadIdx.x; i < Config::kRows * Layout::kChunks; i += Config::kThreads) {
    const int row = i / Layout::kChunks, chunk = i % Layout::kChunks;
    Vec<T, Layout::kElems> values = {};
    if (row < work.rows && chunk * Layout::kElems < p.sizes.head_dim) {
      const DecodeWork::Row query_row = work.row(row);
      values = load_vec<T, Layout::kElems>(
          matrix_of<T>(p.query, work.batch, query_row.head, query_row.index) +
          chunk * Layout::kElems);
      if (sign != 1.f) {
#pragma unroll
        for (T& x : values.values) x = from_float<T>(to_float(x) * sign);
      }
    }
    store_vec(reinterpret_cast<T*>(reinterpret_cast<char*>(s_query) + Layout::offset(row, chunk)),
              values);
  }
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, Config::kBlocksPerSm) void attention_decode_kernel(
    const __grid_constant__ AttentionParams p, const typename Config::Scale scale,
    const __grid_constant__ DecodePlan plan) {
  using T = typename Config::T;
  using Layout = typename Config::Layout;
  using Matmul = typename Config::Matmul;
  constexpr int kKeys = Config::kKeys, kTiles = Config::kTiles, kStages = Config::kStages;
  constexpr int kDim = Config::kDim, kStep = Config::kShape.step_keys();
  extern __shared__ __align__(1024) char s_bytes[];
  auto& s = *reinterpret_cast<typename Config::Shared*>(s_bytes);
  typename Config::Work work(plan);
  griddep_wait();
  work.find_keys(p);

  // NOTE: if this code used threadIdx.x, the compiler would recompute the values that depend on
  // `warp` and `lane`. Every step of the loop would then have 27 more instructions.
  const int thread = fresh_thread(), warp = thread / kWarp, lane = thread % kWarp;
  const KeyRange32 split_keys = work.split_keys(kKeys);
  const int first_key = split_keys.begin + warp * kKeys;
  using Loader = AttentionLoader<Layout, kKeys, kWarp>;
  Loader load_key(matrix_of<T>(p.key, work.batch, work.kv_head, work.pad + first_key),
                  p.key.row_stride, static_cast<int>(p.sizes.head_dim), lane);
  Loader load_value(matrix_of<T>(p.value, work.batch, work.kv_head, work.pad + first_key),
                    p.value.row_stride, static_cast<int>(p.sizes.head_dim_v), lane);
  const auto load = [&](int key, int stage) {
    if (key < split_keys.end) {
      load_key.load(lane, shared_address(s.rings[warp][stage][0]), split_keys.end - key);
      load_value.load(lane, shared_address(s.rings[warp][stage][1]), split_keys.end - key);
      load_key.template skip<kStep - kKeys>();
      load_value.template skip<kStep - kKeys>();
    }
    copy_async_commit();
  };
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) load(first_key + i * kStep, i);
  load_decode_query<Config>(p, work, scale.sign, s.query);
  if constexpr (Config::kMasked) {
    if (warp == 0) work.find_gaps(p, s.gaps);
  }
  __syncthreads();

  const typename Config::FragmentKeys fragment_keys(p, work);
  const Matmul matmul(lane, 0);
  typename Matmul::Out r_out = {};
  OnlineRow rows[kTiles][2];
  start(rows);
  int stage = 0;
  for (int key = first_key; key < split_keys.end; key += kStep) {
    copy_async_wait<kStages - 2>();
    if constexpr (Config::kMasked) {
      Loader::clear_gaps(lane, s.rings[warp][stage][1], s.gaps, key);
    }
    __syncwarp();
    load(key + (kStages - 1) * kStep, stage == 0 ? kStages - 1 : stage - 1);
    typename Matmul::Scores r_s = {};
    matmul.scores(r_s, reinterpret_cast<const char*>(s.query),
                  reinterpret_cast<const char*>(s.rings[warp][stage][0]), kDim);
    if constexpr (Config::kMasked) {
      if (scale.softcap > 0.f) cap_scores</*kExact=*/false>(r_s, scale.cap);
      if (p.mask.alibi) DecodeFragmentAlibi<kTiles>(p, work, scale).add_to(r_s, key);
    }
    fragment_keys.hide_others(r_s, key);
    float factor[kTiles][2];
    online_softmax<Matmul::kFtz>(r_s, rows, factor, scale.c);
    rescale(r_out, factor);
    matmul.attend(r_out, r_s, reinterpret_cast<const char*>(s.rings[warp][stage][1]), kDim);
    if (++stage == kStages) stage = 0;
  }
  copy_async_wait<0>();
  __syncthreads();  // all warps have read the rings, whose memory now receives the sums
  griddep_launch_dependents();

  const DecodeSums<Config> sums = {p, scale, work, s};
  sums.gather(rows, r_out);
  const int splits = static_cast<int>(plan.splits.divisor());
  if (splits == 1) {
    sums.store();
  } else if (work.split < splits - 1) {
    sums.store_partial();
  } else {
    sums.reduce_partials();
  }
}

template <typename T, bool kMasked>
void launch_attention_decode(const AttentionParams& p, cudaStream_t stream) {
  dispatch_index<kNumAttentionDecodeTiles>(p.choice.tile, [&](auto index) {
    using Config = AttentionDecodeConfig<T, index.value, kMasked>;
    using Shared = typename Config::Shared;
    static_assert(sizeof(Shared) <= Config::kShape.tile_bytes() + kAttentionDecodeExtraBytes);
    const DecodePlan plan = DecodePlan::make(p);
    Grid grid(plan.blocks(p.sizes.batch), Config::kThreads, int(sizeof(Shared)));
    grid.overlaps = device_facts().clusters;
    launch_kernel(attention_decode_kernel<Config>, grid, stream, p, Config::scale(p), plan);
  });
}

}  // namespace torchweld
