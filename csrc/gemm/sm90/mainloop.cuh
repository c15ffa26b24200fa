// The mainloop of the kernel on wgmma and TMA: a consumer warpgroup multiplies the k-blocks of a
// work tile from the stages that its producer fills (kernel.cuh).
#pragma once

#include <type_traits>

#include "device/features.cuh"
#include "device/sm90/pipeline.cuh"
#include "device/sm90/wgmma.cuh"
#include "gemm/element.cuh"
#include "gemm/sm90/params.h"

namespace torchweld {

template <GemmMath kMath_, int kTile_, bool kAKMajor_, bool kBKMajor_, bool kGated_,
          bool kDbias_ = false>
struct Sm90Config {
  static constexpr GemmMath kMath = kMath_;
  static constexpr int kTile = kTile_;
  static constexpr bool kBf16x3 = kMath == GemmMath::kFloat32;
  using Result = ElementOf<kMath>;
  using T = std::conditional_t<kBf16x3, __nv_bfloat16, Result>;  // of the wgmma operands
  static constexpr bool kAKMajor = kAKMajor_, kBKMajor = kBKMajor_, kGated = kGated_;
  static constexpr bool kDbias = kDbias_;  // also sums a's rows
  static constexpr Sm90Tile kT = kSm90Tiles[kTile];
  // Halves of each wgmma operand's rows; a gate needs pairs of b's rows.
  static constexpr int kHalvesA = kGated && kT.swap_ab() ? 2 : 1,
                       kHalvesB = kGated && !kT.swap_ab() ? 2 : 1;
  static constexpr int kBlockK = kKBlockBytes / int(sizeof(T));
  // Values of M or N in a swizzle row of an MN-major tile, and bytes to the next ones.
  static constexpr int kSwizzleRowElems = kBlockK, kLeadingBytes = kBlockK * kSwizzleRowBytes;
};

// bf16x3 multiplies six pairs of terms. The mainloop multiplies kTermKBlocks k-blocks of one pair
// after the other. Two bits of kTermOfA and kTermOfB are the terms of a pair; the lowest bits are
// those of the first pair.
inline constexpr int kTermPairs = 6, kTermKBlocks = 4;
inline constexpr uint32_t kTermOfA = 0b10'00'01'01'00'00, kTermOfB = 0b00'10'01'00'01'00;

#if TW_HAS_WGMMA
// The sums of a warpgroup's rows of a: accumulators of a wgmma whose b is (8, K) of ones. Each sum
// is in all 8 columns of the fragment, so four threads hold it twice.
template <class Config, bool kDbias = Config::kDbias>
struct Sm90DbiasSums {
  float sums[Config::kT.wgmma_m_tiles()][4];
};
template <class Config>
struct Sm90DbiasSums<Config, false> {};

// acc = (scale_d ? acc : 0) + a @ b^T over k_blocks k-blocks, for a warpgroup's rows of a work
// tile. s_a and s_b are the addresses of its operands in stage 0. With kDbias, a's rows are added
// to `dbias`, and s_ones is the address of the ones. Calls `issued` after the last wgmma is issued.
template <class Config, bool kDbias = false, class Sums, class Release, class Issued>
__device__ __forceinline__ void sm90_mainloop(
    Sums& acc, PipelineBarriers<Config::kT.stages>& pipeline, PipelineState<Config::kT.stages>& at,
    uint32_t s_a, uint32_t s_b, int k_blocks, const Release& release, const Issued& issued,
    bool scale_d = false, Sm90DbiasSums<Config>* dbias = nullptr, uint32_t s_ones = 0) {
  constexpr Sm90Tile kT = Config::kT;
  constexpr int kSlices = 4,
                kMTileBytes = Config::kAKMajor ? 64 * kKBlockBytes : Config::kLeadingBytes;
  // Bytes from one slice of K to the next.
  constexpr uint32_t kNextA = Config::kAKMajor ? 32 : 16 * kSwizzleRowBytes;
  constexpr uint32_t kNextB = Config::kBKMajor ? 32 : 16 * kSwizzleRowBytes;
  const auto descriptor = [](bool k_major, uint32_t s_at) {
    return k_major ? k_major_descriptor(s_at) : mn_major_descriptor(s_at, Config::kLeadingBytes);
  };
  int before = 0;
  for (int k_block = 0; k_block < k_blocks; ++k_block) {
    pipeline.wait(at);
    const uint32_t stage = at.stage * kT.stage_bytes();
    const uint64_t a = descriptor(Config::kAKMajor, s_a + stage);
    const uint64_t b = descriptor(Config::kBKMajor, s_b + stage);
    wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
#pragma unroll
      for (int i = 0; i < kT.wgmma_m_tiles(); ++i) {
        Wgmma<typename Config::T, kT.block_n>::template multiply<!Config::kAKMajor,
                                                                 !Config::kBKMajor>(
            acc[i], a + ((slice * kNextA + i * kMTileBytes) >> 4), b + (slice * kNextB >> 4),
            scale_d || k_block > 0 || slice > 0);
        if constexpr (kDbias) {
          Wgmma<typename Config::T, 8>::template multiply<!Config::kAKMajor, 0>(
              dbias->sums[i], a + ((slice * kNextA + i * kMTileBytes) >> 4),
              same_values_descriptor(s_ones), 1);
        }
      }
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (k_block > 0) release(before);  // its wgmmas have finished
    before = at.stage;
    at.advance();
  }
  issued();
  wgmma_wait<0>();
  release(before);
}

// sums = a @ b^T over k_blocks k-blocks, for fp32 operands as bf16x3 terms.
// NOTE: tensor cores truncate when they accumulate, so their chains are short, and rounding
// additions add them to the sums. The smaller terms of inf and NaN are 0, so their products may be
// NaN; if the sum of the largest terms' products is not finite, it is the result.
template <class Config, class Sums, class Release>
__device__ __forceinline__ void sm90_bf16x3_mainloop(Sums& sums,
                                                     PipelineBarriers<Config::kT.stages>& pipeline,
                                                     PipelineState<Config::kT.stages>& at,
                                                     uint32_t s_a, uint32_t s_b, int k_blocks,
                                                     const Release& release) {
  constexpr int kValues = sizeof(Sums) / sizeof(float);
  using Flat = float[kValues];
  Sums acc;
  Flat &to = reinterpret_cast<Flat&>(sums), &from = reinterpret_cast<Flat&>(acc);
#pragma unroll
  for (int i = 0; i < kValues; ++i) to[i] = 0.f;
  for (int done = 0; done < k_blocks; done += kTermKBlocks) {
    const int block = min(kTermKBlocks, k_blocks - done);
    sm90_mainloop<Config>(acc, pipeline, at, s_a, s_b, block, release, [] {});
#pragma unroll
    for (int i = 0; i < kValues; ++i) to[i] += from[i];
    sm90_mainloop<Config>(acc, pipeline, at, s_a, s_b, (kTermPairs - 1) * block, release, [] {});
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      to[i] = fabsf(to[i]) <= 3.402823466e38f ? to[i] + from[i] : to[i];
    }
  }
}

// sm90_mainloop that also sums a's rows (dbias). The tiles of one row of tiles read the same rows
// of a, so each sums them over its share of K only.
template <class Config, class Sums, class Release, class Issued>
__device__ __forceinline__ void sm90_dbias_mainloop(
    const Sm90Params& p, const Sm90TileScheduler<Config::kT.cluster, false>& scheduler, Sums& acc,
    Sm90DbiasSums<Config>& dbias, PipelineBarriers<Config::kT.stages>& pipeline,
    PipelineState<Config::kT.stages>& at, uint32_t s_a, uint32_t s_b, uint32_t s_ones,
    const Release& release, const Issued& issued) {
  // NOTE: the accumulators are cleared here, before the three loops. If each loop could be the one
  // that clears them, the assembler would copy them and wait for every wgmma.
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
    sm90_mainloop<Config>(acc, pipeline, at, s_a, s_b, own - scheduler.first_k_block, release,
                          issued_by(own), true);
  }
  if (own_end > own) {
    sm90_mainloop<Config, true>(acc, pipeline, at, s_a, s_b, own_end - own, release,
                                issued_by(own_end), true, &dbias, s_ones);
  }
  if (end > own_end) {
    sm90_mainloop<Config>(acc, pipeline, at, s_a, s_b, end - own_end, release, issued_by(end),
                          true);
  }
}
#endif

}  // namespace torchweld
