// The mainloop of the matmul on wgmma and TMA. The producer loads k-blocks into stages of shared
// memory (kernel.cuh). In the mainloop a consumer warpgroup multiplies the k-blocks of a work tile.
#pragma once

#include <type_traits>

#include "device/features.cuh"
#include "device/sm90/pipeline.cuh"
#include "device/sm90/wgmma.cuh"
#include "gemm/element.cuh"
#include "gemm/sm90/params.h"

namespace torchweld::sm90 {

template <GemmMath kMath_, int kTile_, bool kAKMajor_, bool kBKMajor_, bool kGated_,
          bool kDbias_ = false>
struct KernelConfig {
  static constexpr GemmMath kMath = kMath_;
  static constexpr int kTile = kTile_;
  static constexpr bool kBf16x3 = kMath == GemmMath::kFloat32;
  using Result = ElementOf<kMath>;
  // Element type of the wgmma operands.
  using T = std::conditional_t<kBf16x3, __nv_bfloat16, Result>;
  static constexpr bool kAKMajor = kAKMajor_, kBKMajor = kBKMajor_, kGated = kGated_;
  static constexpr bool kDbias = kDbias_;  // whether the kernel also sums each row of a
  static constexpr Tile kT = kTiles[kTile];
  // The number of halves that wgmma's operands A and B consist of. In a gated product, b has two
  // halves: left and right. Every other operand counts as one half. b is operand A in a swap_ab
  // tile and operand B in every other tile.
  static constexpr int kHalvesA = kGated && kT.swap_ab() ? 2 : 1,
                       kHalvesB = kGated && !kT.swap_ab() ? 2 : 1;
  // Whether the K dim may be the concatenation of several segments (GemmSegments).
  static constexpr bool kSegments = kMath != GemmMath::kTf32 && !kBf16x3 && !kGated &&
                                    (kT.swap_ab() ? !kAKMajor && kBKMajor : kAKMajor && !kBKMajor);
  static constexpr int kBlockK = kKBlockBytes / int(sizeof(T));
  // In an MN-major tile, each swizzle row of shared memory has kSwizzleRowElems elements along M or
  // N. The next kSwizzleRowElems elements along M or N are kLeadingBytes further on.
  static constexpr int kSwizzleRowElems = kBlockK, kLeadingBytes = kBlockK * kSwizzleRowBytes;
};

// bf16x3 computes six products, each of one term of `a` and one term of `b`. The mainloop
// multiplies kTermKBlocks k-blocks of one pair of terms, then the same k-blocks of the next pair.
// kTermOfA >> 2 * i & 3 is the index of a's term in pair i; kTermOfB encodes b's terms in the same
// way.
inline constexpr int kTermPairs = 6, kTermKBlocks = 4;
inline constexpr uint32_t kTermOfA = 0b10'00'01'01'00'00, kTermOfB = 0b00'10'01'00'01'00;

#if TW_HAS_WGMMA
// Computes acc = (scale_d ? acc : 0) + a @ b^T for one slice along K. a and b are descriptors. A
// wgmma has at most 256 columns, so a wider tile needs two wgmmas. In the layout of an MN-major b,
// the second wgmma must start at a multiple of kSwizzleRowElems columns.
template <class Config>
__device__ __forceinline__ void multiply_k_block(float (&acc)[Config::kT.block_n / 2], uint64_t a,
                                                 uint64_t b, int scale_d) {
  using T = typename Config::T;
  constexpr int kColumns = Config::kT.block_n, kFirst = kColumns > 256 ? 192 : kColumns;
  constexpr int kTransA = !Config::kAKMajor, kTransB = !Config::kBKMajor;
  Wgmma<T, kFirst>::template multiply<kTransA, kTransB>(
      reinterpret_cast<float (&)[kFirst / 2]>(acc[0]), a, b, scale_d);
  if constexpr (kColumns > kFirst) {
    constexpr int kRest = kColumns - kFirst;
    constexpr uint32_t kRestBytes = Config::kBKMajor
                                        ? kFirst * kKBlockBytes
                                        : kFirst / Config::kSwizzleRowElems * Config::kLeadingBytes;
    Wgmma<T, kRest>::template multiply<kTransA, kTransB>(
        reinterpret_cast<float (&)[kRest / 2]>(acc[kFirst / 2]), a, b + (kRestBytes >> 4), scale_d);
  }
}

// Holds the sum of each row of a, for the rows that a warpgroup multiplies. The sums are the
// accumulators of a wgmma whose operand B is an (8, K) matrix of ones. Therefore all 8 columns of
// the result are equal. Four threads share a row of the result, and each of them holds the sum
// twice.
template <class Config, bool kDbias = Config::kDbias>
struct DbiasSums {
  float sums[Config::kT.wgmma_m_tiles()][4];

  // Stores the sums. `first_row` is the warpgroup's first row in the tile.
  __device__ __forceinline__ void store(const GemmParams& p, const WorkTile& work, int rank,
                                        int first_row) const {
    constexpr Tile kT = Config::kT;
    const int thread = threadIdx.x % 128;
    const int64_t row = (work.tile_m * kT.cluster + rank) * kT.block_m + first_row +
                        thread / 32 * 16 + thread % 32 / 4;
    float* g_to = p.dbias_partials + work.tile_n * p.m;
#pragma unroll
    for (int i = 0; i < kT.wgmma_m_tiles(); ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t at_row = row + i * 64 + half * 8;
        if (thread % 4 == 0 && at_row < p.m) g_to[at_row] = sums[i][2 * half];
      }
    }
  }
};
template <class Config>
struct DbiasSums<Config, false> {};

struct NoPreparation {
  __device__ __forceinline__ void operator()(int, int) const {}
};

// Computes acc = (scale_d ? acc : 0) + a @ b^T over k_blocks k-blocks, for the rows of one
// warpgroup. s_a and s_b are the addresses of the warpgroup's operands in stage 0. If kDbias is
// true, also adds the sum of each row of a to `dbias`. In this case s_ones is the address of the
// matrix of ones. Calls `issued` when all wgmmas have been issued. If `prepare` is given, calls it
// with a k-block and its stage before the k-block is multiplied.
template <class Config, bool kDbias = false, class Sums, class Release, class Issued,
          class Prepare = NoPreparation>
__device__ __forceinline__ void mainloop(Sums& acc, PipelineBarriers<Config::kT.stages>& pipeline,
                                         PipelineState<Config::kT.stages>& at, uint32_t s_a,
                                         uint32_t s_b, int k_blocks, const Release& release,
                                         const Issued& issued, bool scale_d = false,
                                         DbiasSums<Config>* dbias = nullptr, uint32_t s_ones = 0,
                                         const Prepare& prepare = {}) {
  constexpr Tile kT = Config::kT;
  constexpr int kSlices = 4,
                kMTileBytes = Config::kAKMajor ? 64 * kKBlockBytes : Config::kLeadingBytes;
  // The distance in bytes between slices along K. A slice is the part of K that one wgmma reads. In
  // a K-major operand, it is 32 bytes of each swizzle row. In an MN-major operand, it is 16 swizzle
  // rows, one for each 16-bit value along K.
  constexpr uint32_t kNextA = Config::kAKMajor ? 32 : 16 * kSwizzleRowBytes;
  constexpr uint32_t kNextB = Config::kBKMajor ? 32 : 16 * kSwizzleRowBytes;
  const auto descriptor = [](bool k_major, uint32_t s_at) {
    return k_major ? k_major_descriptor(s_at) : mn_major_descriptor(s_at, Config::kLeadingBytes);
  };
  int before = 0;
  for (int k_block = 0; k_block < k_blocks; ++k_block) {
    pipeline.wait(at);
    prepare(k_block, at.stage);
    const uint32_t stage = at.stage * kT.stage_bytes();
    const uint64_t a = descriptor(Config::kAKMajor, s_a + stage);
    const uint64_t b = descriptor(Config::kBKMajor, s_b + stage);
    wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
#pragma unroll
      for (int i = 0; i < kT.wgmma_m_tiles(); ++i) {
        multiply_k_block<Config>(acc[i], a + ((slice * kNextA + i * kMTileBytes) >> 4),
                                 b + (slice * kNextB >> 4), scale_d || k_block > 0 || slice > 0);
        if constexpr (kDbias) {
          Wgmma<typename Config::T, 8>::template multiply<!Config::kAKMajor, 0>(
              dbias->sums[i], a + ((slice * kNextA + i * kMTileBytes) >> 4),
              same_values_descriptor(s_ones), 1);
        }
      }
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (k_block > 0) release(before);  // the wgmmas of the previous k-block have finished
    before = at.stage;
    at.advance();
  }
  issued();
  wgmma_wait<0>();
  release(before);
}

// Computes sums = a @ b^T over k_blocks k-blocks. The operands are fp32 values, stored as three
// bf16 terms (bf16x3).
// NOTE: tensor cores truncate when they accumulate. Therefore acc accumulates only a few k-blocks,
// and fp32 additions with rounding add acc to `sums`. If a value is inf or NaN, its two smaller
// terms are 0, and 0 * inf would be NaN. Therefore, if the products of the largest terms have a
// non-finite sum, that sum is the result and the other products are not added.
template <class Config, class Sums, class Release>
__device__ __forceinline__ void bf16x3_mainloop(Sums& sums,
                                                PipelineBarriers<Config::kT.stages>& pipeline,
                                                PipelineState<Config::kT.stages>& at, uint32_t s_a,
                                                uint32_t s_b, int k_blocks,
                                                const Release& release) {
  constexpr int kValues = sizeof(Sums) / sizeof(float);
  using Flat = float[kValues];
  Sums acc;
  Flat &to = reinterpret_cast<Flat&>(sums), &from = reinterpret_cast<Flat&>(acc);
#pragma unroll
  for (int i = 0; i < kValues; ++i) to[i] = 0.f;
  for (int done = 0; done < k_blocks; done += kTermKBlocks) {
    const int block = min(kTermKBlocks, k_blocks - done);
    mainloop<Config>(acc, pipeline, at, s_a, s_b, block, release, [] {});
#pragma unroll
    for (int i = 0; i < kValues; ++i) to[i] += from[i];
    mainloop<Config>(acc, pipeline, at, s_a, s_b, (kTermPairs - 1) * block, release, [] {});
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      to[i] = fabsf(to[i]) <= 3.402823466e38f ? to[i] + from[i] : to[i];
    }
  }
}

// Runs mainloop and also computes the sum of each row of a (dbias). All tiles with the same
// tile_m read the same rows of a. Therefore K is divided among these tiles, and each tile sums the
// rows of a only over its own range of K.
template <class Config, class Sums, class Release, class Issued>
__device__ __forceinline__ void dbias_mainloop(
    const KernelParams& p, const TileScheduler<Config::kT.cluster, false>& scheduler, Sums& acc,
    DbiasSums<Config>& dbias, PipelineBarriers<Config::kT.stages>& pipeline,
    PipelineState<Config::kT.stages>& at, uint32_t s_a, uint32_t s_b, uint32_t s_ones,
    const Release& release, const Issued& issued) {
  // NOTE: the accumulators are set to 0 here and not in the first call of mainloop, because
  // any of the three calls may be skipped. If each call decided at run time whether to clear the
  // accumulators, ptxas would copy the accumulators and wait for every wgmma.
#pragma unroll
  for (auto& tile : dbias.sums) {
    tile[0] = tile[1] = tile[2] = tile[3] = 0.f;
    warpgroup_fence_operand(tile);
  }
#pragma unroll
  for (auto& tile : acc) {
#pragma unroll
    for (float& x : tile) x = 0.f;
    warpgroup_fence_operand(tile);
  }
  const int tile_n = int(WorkTile(p.schedule, scheduler.tile).tile_n),
            tiles = int(p.schedule.tiles_n);
  const int64_t all = p.stream_k.k_blocks.divisor();
  const int end = scheduler.first_k_block + scheduler.k_blocks;
  const int own = min(max(int(all * tile_n / tiles), scheduler.first_k_block), end);
  const int own_end = min(max(int(all * (tile_n + 1) / tiles), own), end);
  const auto issued_by = [&](int last_end) {
    return [&issued, last = last_end == end] {
      if (last) issued();
    };
  };
  if (own > scheduler.first_k_block) {
    mainloop<Config>(acc, pipeline, at, s_a, s_b, own - scheduler.first_k_block, release,
                     issued_by(own), true);
  }
  if (own_end > own) {
    mainloop<Config, true>(acc, pipeline, at, s_a, s_b, own_end - own, release, issued_by(own_end),
                           true, &dbias, s_ones);
  }
  if (end > own_end) {
    mainloop<Config>(acc, pipeline, at, s_a, s_b, end - own_end, release, issued_by(end), true);
  }
}

// The mainloop of a consumer warpgroup whose first row in the tile is `first_row`.
template <class Config>
struct Mainloop {
  uint32_t s_a, s_b;  // the warpgroup's operands in stage 0
  PipelineState<Config::kT.stages> at;

  __device__ __forceinline__ Mainloop(const char* s_stage, int first_row)
      : s_a(shared_address(s_stage) +
            (Config::kAKMajor ? first_row * kKBlockBytes
                              : first_row / Config::kSwizzleRowElems * Config::kLeadingBytes)),
        s_b(shared_address(s_stage) + Config::kT.block_m * kKBlockBytes) {}

  // Passes over the k-blocks of a tile that the other warpgroup computes.
  __device__ __forceinline__ void skip(int k_blocks) { at.advance(k_blocks); }

  // Computes the sums of the scheduler's k-blocks. Calls `issued` when all wgmmas have been issued.
  template <class Sums, class Scheduler, class Shared, class Release, class Issued>
  __device__ __forceinline__ void run(const KernelParams& p, const Scheduler& scheduler, Sums& all,
                                      Shared& s, const Release& release, const Issued& issued) {
    if constexpr (Config::kBf16x3) {
      bf16x3_mainloop<Config>(all.acc, s.pipeline, at, s_a, s_b, scheduler.k_blocks, release);
    } else if constexpr (Config::kDbias) {
      dbias_mainloop<Config>(p, scheduler, all.acc, all, s.pipeline, at, s_a, s_b,
                             shared_address(s.bias), release, issued);
    } else {
      mainloop<Config>(all.acc, s.pipeline, at, s_a, s_b, scheduler.k_blocks, release, issued,
                       /*scale_d=*/false, nullptr, 0, scheduler.preparation(s));
    }
  }
};
#endif

}  // namespace torchweld::sm90
