// What the kernel for few tokens reads: all of a part's columns of x for the block, and a warp's
// steps of the weight, one tile after the other, straight into registers.
#pragma once

#include "device/features.cuh"
#include "device/sm90/bulk.cuh"
#include "device/sm90/dependent_launch.cuh"
#include "int4/decode/math.cuh"
#include "int4/params.h"

namespace torchweld {

// NOTE: close together, as each line of parameters is a miss of the constant cache in every block.
struct Int4DecodeParams : Int4Operands {
  int tokens, rows;  // of x, of the weight
  Int4DecodePlan plan;
};

// NOTE: volatile, so that none of them moves before griddep_wait.
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

// The steps of K of a round's tiles, one after the other, divided among the warps.
class Int4DecodeShares {
 public:
  __device__ __forceinline__ explicit Int4DecodeShares(uint32_t steps)
      : all_(steps), own_((steps + Int4DecodeTile::kWarps - 1) / Int4DecodeTile::kWarps) {}
  __device__ __forceinline__ uint32_t begin(uint32_t warp) const { return min(warp * own_, all_); }
  __device__ __forceinline__ uint32_t count(uint32_t warp) const {
    return min(warp * own_ + own_, all_) - begin(warp);
  }
  // The warp that has this step. Exact below 2^20 steps.
  __device__ __forceinline__ uint32_t warp_of(uint32_t step) const {
    return static_cast<uint32_t>(
        __fdividef(static_cast<float>(step) + 0.5f, static_cast<float>(own_)));
  }

 private:
  uint32_t all_, own_;  // the last warps may have fewer than own_
};

// A lane's way to its words, scales and zeros. Steps are counted from the weight's first one on.
template <int kTile>
class Int4DecodeLoader {
  static constexpr Int4DecodeTile kT = kInt4DecodeTiles[kTile];
  static constexpr int kSliceBytes = kT.slice_bytes(), kStepBytes = kSliceBytes * kT.slices;

 public:
  using Slice = Int4DecodeSlice<kT.chunks>;

  __device__ __forceinline__ Int4DecodeLoader(const Int4DecodeParams& p, int lane)
      : g_words_(p.words + lane * 16), g_scale_(p.scale + lane / 4 * 4) {
    // NOTE: opaque, so that an address is one multiply-add of a small index; the compiler would
    // compute these anew in every step.
    asm volatile("" : "+l"(g_words_), "+l"(g_scale_));
  }

  __device__ __forceinline__ void load(Slice& to, const Int4DecodeParams& p, uint32_t step,
                                       int slice) const {
    const uint32_t at = step * kT.slices + slice;
    const char* g_from = g_words_ + uint64_t{at} * kSliceBytes;
#pragma unroll
    for (int c = 0; c < kT.chunks; ++c) to.words[c] = load_words_once(g_from + c * 512);
    const uint32_t group = p.plan.group_slices.divide(at);
    to.scale = load_global_word(g_scale_ + uint64_t{group} * 32);
    to.zeros = load_global_words_2(p.zero + uint64_t{group} * 8);
  }

  // Brings at most kAhead neighbouring steps to L2.
  __device__ __forceinline__ void prefetch(const Int4DecodeParams& p, uint32_t step, uint32_t steps,
                                           int lane) const {
    const char* g_from = g_words_ + lane * (128 - 16) + uint64_t{step} * kStepBytes;
#pragma unroll
    for (int i = 0; i < (kT.kAhead * kStepBytes + 4095) / 4096; ++i) {
      if ((i * 32 + lane) * 128u < steps * kStepBytes) prefetch_line(g_from + i * 4096);
    }
    // A line has the scales of 4 groups or the zeros of 16.
    const uint32_t group = p.plan.group_slices.divide(step * kT.slices);
    if (lane * 4u < steps * kT.slices) prefetch_line(p.scale + uint64_t{group + lane * 4} * 32);
    if (lane == 0 && steps > 0) prefetch_line(p.zero + uint64_t{group} * 8);
  }

 private:
  const char *g_words_, *g_scale_;
};

// A part's columns of x in shared memory, row after row, in pieces. Blocks that share x bring a
// share of every piece to all of them.
template <typename T, int kTile>
struct Int4DecodeX {
  static constexpr Int4DecodeTile kT = kInt4DecodeTiles[kTile];
  static constexpr int kStepBytes = kT.step_chunks() * kInt4ChunkK * sizeof(T);
  // NOTE: without a neighbour to share with, 16 bytes a thread are as fast as bulk copies.
  static constexpr bool kShares = TW_HAS_CLUSTERS && kT.share > 1;

  uint64_t* s_barriers;  // of the sums of parts, then of the pieces of x
  char* s_x;
  uint32_t there = 0;  // a bit for each piece that this warp has waited for

  __device__ __forceinline__ void prepare(const Int4DecodeParams& p) {
#if TW_HAS_CLUSTERS
    if constexpr (kT.cluster() > 1) {
      if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i <= kT.kPieces; ++i) mbarrier_init(s_barriers + i, 1);
        mbarrier_init_fence();
#pragma unroll
        for (int i = 0; i < kT.kPieces; ++i) {
          const int steps = piece_steps(p.plan, i);
          if (kShares && steps > 0) {
            mbarrier_arrive_expect_tx(s_barriers + 1 + i, p.tokens * steps * kStepBytes);
          }
        }
      }
      __syncwarp();
      cluster_arrive_relaxed();
    }
#endif
  }

  // All blocks of the cluster have prepared.
  __device__ __forceinline__ void meet() {
#if TW_HAS_CLUSTERS
    if constexpr (kT.cluster() > 1) cluster_wait();
#endif
  }

  __device__ __forceinline__ void start(const Int4DecodeParams& p, int part) {
    const int bytes = p.plan.part_steps * kStepBytes;
    const char* g_x = p.x + int64_t{part} * bytes;
    if constexpr (kShares) {
#if TW_HAS_CLUSTERS
      // NOTE: all warps take part, as copies that one sends leave one after the other.
      if (threadIdx.x % 32 != 0) return;
      const int copies = p.tokens * kT.kPieces;
#pragma unroll 1
      for (int i = threadIdx.x / 32; i < copies; i += kT.kWarps) {
        const int piece = p.plan.tokens.divide(i), token = i - piece * p.tokens;
        const int steps = piece_steps(p.plan, piece);
        if (steps <= 0) return;
        const int own = steps * (kStepBytes / kT.share);
        const int at = piece * p.plan.piece_steps * kStepBytes + blockIdx.x % kT.share * own;
        bulk_load_to_all(s_x + token * p.plan.x_row_bytes + at, g_x + token * p.x_row_bytes + at,
                         own, s_barriers + 1 + piece, (1 << kT.share) - 1);
      }
#endif
    } else {
#pragma unroll 1
      for (int at = threadIdx.x * 16; at < bytes; at += kT.kThreads * 16) {
        const char* g_from = g_x + at;
        uint32_t s_to = shared_address(s_x) + at;
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

  // For the block, where nothing tells of pieces.
  __device__ __forceinline__ void wait() {
    if constexpr (!kShares) {
      copy_async_wait<0>();
      __syncthreads();
    }
  }

  // For a step of the part.
  __device__ __forceinline__ void wait(uint32_t step, const Int4DecodePlan& plan) {
#if TW_HAS_CLUSTERS
    if constexpr (kShares) {
      const uint32_t piece = plan.piece_divisor.divide(step);
      if (there >> piece & 1) return;
      mbarrier_wait(s_barriers + 1 + piece, 0);
      there |= 1 << piece;
    }
#endif
  }

  // For a block that multiplies nothing: its memory is what its neighbour writes to.
  __device__ __forceinline__ void wait_all(const Int4DecodePlan& plan) {
    for (int step = 0; step < plan.part_steps; step += plan.piece_steps) wait(step, plan);
  }

 private:
  static __device__ __forceinline__ int piece_steps(const Int4DecodePlan& plan, int piece) {
    return min(plan.piece_steps, plan.part_steps - piece * plan.piece_steps);
  }
};

}  // namespace torchweld
