// The loads of the decode kernel: the split's columns of x into shared memory, and a warp's
// k-blocks of the weight directly into registers.
#pragma once

#include "device/features.cuh"
#include "device/sm90/bulk.cuh"
#include "device/sm90/dependent_launch.cuh"
#include "int4/decode/math.cuh"
#include "int4/params.h"

namespace torchweld {

// NOTE: this struct is small, because each block has one miss in the constant cache per 64 bytes of
// parameters.
struct Int4DecodeParams : Int4Operands {
  int tokens, rows;  // number of tokens of x, number of rows of the weight
  Int4DecodePlan plan;
};

// NOTE: the load is volatile, so that the compiler does not move it before griddep_wait.
__device__ __forceinline__ uint2 load_global_words_2(const void* g_from) {
  uint2 w;
  asm volatile("ld.global.v2.b32 {%0, %1}, [%2];" : "=r"(w.x), "=r"(w.y) : "l"(g_from));
  return w;
}

__device__ __forceinline__ uint32_t load_global_word(const void* g_from) {
  uint32_t w;
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(w) : "l"(g_from));
  return w;
}

// Divides the k-blocks of all tiles of a round among the warps. The k-blocks of a tile are
// consecutive.
class Int4DecodePartition {
 public:
  __device__ __forceinline__ explicit Int4DecodePartition(uint32_t k_blocks)
      : total_(k_blocks),
        per_warp_((k_blocks + Int4DecodeTile::kWarps - 1) / Int4DecodeTile::kWarps) {}
  __device__ __forceinline__ uint32_t begin(uint32_t warp) const {
    return min(warp * per_warp_, total_);
  }
  __device__ __forceinline__ uint32_t count(uint32_t warp) const {
    return min(warp * per_warp_ + per_warp_, total_) - begin(warp);
  }
  // Returns the warp that computes k_block. The result is exact below 2^20 k-blocks.
  __device__ __forceinline__ uint32_t warp_of(uint32_t k_block) const {
    return static_cast<uint32_t>(
        __fdividef(static_cast<float>(k_block) + 0.5f, static_cast<float>(per_warp_)));
  }

 private:
  // total_ is the number of k-blocks of all warps together. per_warp_ is the number of k-blocks of
  // one warp; the last warps may have fewer.
  uint32_t total_, per_warp_;
};

// Loads a lane's words, scales and zeros. k_block is an index in the whole weight.
template <int kTile>
class Int4DecodeLoader {
  static constexpr Int4DecodeTile kT = kInt4DecodeTiles[kTile];
  static constexpr int kSliceBytes = kT.slice_bytes(), kKBlockBytes = kSliceBytes * kT.slices;

 public:
  using Slice = Int4DecodeSlice<kT.chunks>;

  __device__ __forceinline__ Int4DecodeLoader(const Int4DecodeParams& p, int lane)
      : g_words_(p.words + lane * 16), g_scale_(p.scale + lane / 4 * 4) {
    // NOTE: the asm hides the pointers from the compiler, so that an address needs one
    // multiply-add. Without the asm the compiler would recompute the pointers in every k-block.
    asm volatile("" : "+l"(g_words_), "+l"(g_scale_));
  }

  __device__ __forceinline__ void load(Slice& to, const Int4DecodeParams& p, uint32_t k_block,
                                       int slice) const {
    const uint32_t index = k_block * kT.slices + slice;
    const char* g_from = g_words_ + uint64_t{index} * kSliceBytes;
#pragma unroll
    for (int c = 0; c < kT.chunks; ++c) to.words[c] = load_words_once(g_from + c * 512);
    const uint32_t group = p.plan.group_slices.divide(index);
    to.scale = load_global_word(g_scale_ + uint64_t{group} * 32);
    to.zeros = load_global_words_2(p.zero + uint64_t{group} * 8);
  }

  // Prefetches k_blocks consecutive k-blocks to L2. k_blocks must be at most kPrefetched.
  __device__ __forceinline__ void prefetch(const Int4DecodeParams& p, uint32_t k_block,
                                           uint32_t k_blocks, int lane) const {
    const char* g_from = g_words_ + lane * (128 - 16) + uint64_t{k_block} * kKBlockBytes;
#pragma unroll
    for (int i = 0; i < (kT.kPrefetched * kKBlockBytes + 4095) / 4096; ++i) {
      if ((i * 32 + lane) * 128u < k_blocks * kKBlockBytes) prefetch_line(g_from + i * 4096);
    }
    // A cache line has the scales of 4 groups or the zeros of 16 groups.
    const uint32_t group = p.plan.group_slices.divide(k_block * kT.slices);
    if (lane * 4u < k_blocks * kT.slices) prefetch_line(p.scale + uint64_t{group + lane * 4} * 32);
    if (lane == 0 && k_blocks > 0) prefetch_line(p.zero + uint64_t{group} * 8);
  }

 private:
  const char *g_words_, *g_scale_;
};

// A split's columns of x in shared memory, one token after the other. The columns are loaded in
// stages along K. With multicast, each block loads one slice of every stage, for itself and for the
// other blocks that share x.
template <typename T, int kTile>
struct Int4DecodeX {
  static constexpr Int4DecodeTile kT = kInt4DecodeTiles[kTile];
  static constexpr int kKBlockBytes = kT.k_block_chunks() * kInt4ChunkK * sizeof(T);
  // NOTE: without multicast, 16-byte cp.async is as fast as bulk copies.
  static constexpr bool kMulticast = TW_HAS_CLUSTERS && kT.multicast > 1;

  uint64_t* s_barriers;  // one barrier for the partials, then one per stage of x
  char* s_x;
  uint32_t waited = 0;  // bit i is set if this warp has waited for stage i of x

  __device__ __forceinline__ void prepare(const Int4DecodeParams& p) {
#if TW_HAS_CLUSTERS
    if constexpr (kT.cluster() > 1) {
      if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i <= kT.kXStages; ++i) mbarrier_init(s_barriers + i, 1);
        mbarrier_init_fence();
#pragma unroll
        for (int i = 0; i < kT.kXStages; ++i) {
          const int k_blocks = stage_k_blocks(p.plan, i);
          if (kMulticast && k_blocks > 0) {
            mbarrier_arrive_expect_tx(s_barriers + 1 + i, p.tokens * k_blocks * kKBlockBytes);
          }
        }
      }
      __syncwarp();
      cluster_arrive_relaxed();
    }
#endif
  }

  // Waits until all blocks of the cluster have called prepare().
  __device__ __forceinline__ void wait_for_cluster() {
#if TW_HAS_CLUSTERS
    if constexpr (kT.cluster() > 1) cluster_wait();
#endif
  }

  __device__ __forceinline__ void start(const Int4DecodeParams& p, int split) {
    const int bytes = p.plan.split_k_blocks * kKBlockBytes;
    const char* g_x = p.x + int64_t{split} * bytes;
    if constexpr (kMulticast) {
#if TW_HAS_CLUSTERS
      // NOTE: all warps issue copies, because a single warp would issue all copies one after the
      // other.
      if (threadIdx.x % 32 != 0) return;
      const int copies = p.tokens * kT.kXStages;
#pragma unroll 1
      for (int i = threadIdx.x / 32; i < copies; i += kT.kWarps) {
        const int stage = p.plan.tokens.divide(i), token = i - stage * p.tokens;
        const int k_blocks = stage_k_blocks(p.plan, stage);
        if (k_blocks <= 0) return;
        const int slice_bytes = k_blocks * (kKBlockBytes / kT.multicast);
        const int offset =
            stage * p.plan.stage_k_blocks * kKBlockBytes + blockIdx.x % kT.multicast * slice_bytes;
        bulk_load_to_all(s_x + token * p.plan.x_row_bytes + offset,
                         g_x + token * p.x_row_bytes + offset, slice_bytes, s_barriers + 1 + stage,
                         (1 << kT.multicast) - 1);
      }
#endif
    } else {
#pragma unroll 1
      for (int offset = threadIdx.x * 16; offset < bytes; offset += kT.kThreads * 16) {
        const char* g_from = g_x + offset;
        uint32_t s_to = shared_address(s_x) + offset;
#pragma unroll 1
        for (int token = 0; token < p.tokens; ++token) {
          copy_async_16(s_to, g_from, 16);
          s_to += p.plan.x_row_bytes;
          g_from += p.x_row_bytes;
        }
      }
      copy_async_commit();
    }
  }

  // Without multicast the stages have no barriers. In that case this function waits for all of x.
  __device__ __forceinline__ void wait() {
    if constexpr (!kMulticast) {
      copy_async_wait<0>();
      __syncthreads();
    }
  }

  // Waits for the stage of x that contains k-block k_block of the split.
  __device__ __forceinline__ void wait(uint32_t k_block, const Int4DecodePlan& plan) {
#if TW_HAS_CLUSTERS
    if constexpr (kMulticast) {
      const uint32_t stage = plan.stage_divisor.divide(k_block);
      if (waited >> stage & 1) return;
      mbarrier_wait(s_barriers + 1 + stage, 0);
      waited |= 1 << stage;
    }
#endif
  }

  // Waits for all stages of x. A block without tiles calls this function, because it must not exit
  // while other blocks still write to the shared memory of this block.
  __device__ __forceinline__ void wait_all(const Int4DecodePlan& plan) {
    for (int k_block = 0; k_block < plan.split_k_blocks; k_block += plan.stage_k_blocks)
      wait(k_block, plan);
  }

 private:
  static __device__ __forceinline__ int stage_k_blocks(const Int4DecodePlan& plan, int stage) {
    return min(plan.stage_k_blocks, plan.split_k_blocks - stage * plan.stage_k_blocks);
  }
};

}  // namespace torchweld
