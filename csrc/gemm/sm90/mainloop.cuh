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
          bool kSumsRows_ = false>
struct Sm90Config {
  static constexpr GemmMath kMath = kMath_;
  static constexpr int kTile = kTile_;
  static constexpr bool kBf16x3 = kMath == GemmMath::kFloat32;
  using Result = ElementOf<kMath>;
  using T = std::conditional_t<kBf16x3, __nv_bfloat16, Result>;  // of what is multiplied
  static constexpr bool kAKMajor = kAKMajor_, kBKMajor = kBKMajor_, kGated = kGated_;
  static constexpr bool kSumsRows = kSumsRows_;  // of a
  static constexpr Sm90Tile kT = kSm90Tiles[kTile];
  // Rows of the operands; a gate needs pairs of b's rows.
  static constexpr int kHalvesA = kGated && kT.swap_ab() ? 2 : 1,
                       kHalvesB = kGated && !kT.swap_ab() ? 2 : 1;
  static constexpr int kStepElems = kKBlockBytes / int(sizeof(T));
  // A swizzle row of an MN-major tile has this many values of M or N; kLeadingBytes leads to the
  // next.
  static constexpr int kSwizzleRowElems = kStepElems, kLeadingBytes = kStepElems * kSwizzleRowBytes;
};

// bf16x3: six pairs of terms are multiplied, and kTermKBlocks k-blocks for one pair after the
// other. Two bits of kTermOfA and kTermOfB name the terms of a pair, the first pair in the lowest
// bits.
inline constexpr int kTermPairs = 6, kTermKBlocks = 4;
inline constexpr uint32_t kTermOfA = 0b10'00'01'01'00'00, kTermOfB = 0b00'10'01'00'01'00;

#if TW_HAS_WGMMA
// The sums of a's rows in a warpgroup's part of a work tile, as a product with a column of ones
// eight times. They stand where fragments have their columns, each four times.
template <class Config, bool kSumsRows = Config::kSumsRows>
struct Sm90RowSums {
  float of_rows[Config::kT.wgmma_m_tiles()][4];
};
template <class Config>
struct Sm90RowSums<Config, false> {};

// acc = (keeps ? acc : 0) + a @ b^T of some steps of a warpgroup's part of a work tile. s_a and
// s_b: where its part lies in stage 0. s_ones: with it a's rows are added to `rows`. Calls `issued`
// once the last product is on its way.
template <class Config, bool kSumsRows = false, class Sums, class Release, class Issued>
__device__ __forceinline__ void sm90_mainloop(
    Sums& acc, PipelineBarriers<Config::kT.stages>& pipeline, PipelineState<Config::kT.stages>& at,
    uint32_t s_a, uint32_t s_b, int steps, const Release& release, const Issued& issued,
    bool keeps = false, Sm90RowSums<Config>* rows = nullptr, uint32_t s_ones = 0) {
  constexpr Sm90Tile kT = Config::kT;
  constexpr int kSlices = 4,
                kMTileBytes = Config::kAKMajor ? 64 * kKBlockBytes : Config::kLeadingBytes;
  // From one slice of K to the next.
  constexpr uint32_t kNextA = Config::kAKMajor ? 32 : 16 * kSwizzleRowBytes;
  constexpr uint32_t kNextB = Config::kBKMajor ? 32 : 16 * kSwizzleRowBytes;
  const auto descriptor = [](bool k_major, uint32_t s_at) {
    return k_major ? k_major_descriptor(s_at) : mn_major_descriptor(s_at, Config::kLeadingBytes);
  };
  int before = 0;
  for (int step = 0; step < steps; ++step) {
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
            keeps || step > 0 || slice > 0);
        if constexpr (kSumsRows) {
          Wgmma<typename Config::T, 8>::template multiply<!Config::kAKMajor, 0>(
              rows->of_rows[i], a + ((slice * kNextA + i * kMTileBytes) >> 4),
              same_values_descriptor(s_ones), 1);
        }
      }
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (step > 0) release(before);  // the products of the step before have read it
    before = at.stage;
    at.advance();
  }
  issued();
  wgmma_wait<0>();
  release(before);
}

// sums = a @ b^T of fp32 operands as bf16x3 terms, for some k-blocks.
// NOTE: tensor cores truncate when they accumulate, so their chains are short, and additions that
// round add them to the running sums. Where an operand is inf or NaN its smaller terms are 0, whose
// products may be NaN; the products of the largest terms alone are right.
template <class Config, class Sums, class Release>
__device__ __forceinline__ void sm90_bf16x3_mainloop(Sums& sums,
                                                     PipelineBarriers<Config::kT.stages>& pipeline,
                                                     PipelineState<Config::kT.stages>& at,
                                                     uint32_t s_a, uint32_t s_b, int steps,
                                                     const Release& release) {
  constexpr int kValues = sizeof(Sums) / sizeof(float);
  using Flat = float[kValues];
  Sums acc;
  Flat &to = reinterpret_cast<Flat&>(sums), &from = reinterpret_cast<Flat&>(acc);
#pragma unroll
  for (int i = 0; i < kValues; ++i) to[i] = 0.f;
  for (int done = 0; done < steps; done += kTermKBlocks) {
    const int block = min(kTermKBlocks, steps - done);
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

// sm90_mainloop, and the sums of a's rows over the tile's share of K (dbias): the tiles of one row
// of tiles share K.
template <class Config, class Sums, class Release, class Issued>
__device__ __forceinline__ void sm90_summing_mainloop(
    const Sm90Params& p, const Sm90TileScheduler<Config::kT.cluster, false>& scheduler, Sums& acc,
    Sm90RowSums<Config>& rows, PipelineBarriers<Config::kT.stages>& pipeline,
    PipelineState<Config::kT.stages>& at, uint32_t s_a, uint32_t s_b, uint32_t s_ones,
    const Release& release, const Issued& issued) {
  // NOTE: what products begin with is made here and stays: from sums that begin in one of three
  // loops the assembler would make copies, and wait for every product.
#pragma unroll
  for (auto& of : rows.of_rows) {
    of[0] = of[1] = of[2] = of[3] = 0.f;
    warpgroup_fence_operand(of);
  }
#pragma unroll
  for (auto& of : acc) {
#pragma unroll
    for (float& x : of) x = 0.f;
    warpgroup_fence_operand(of);
  }
  const int tile_n = int(WorkTile(p.schedule, scheduler.tile).tile_n),
            tiles = int(p.schedule.tiles_n);
  const int64_t all = p.stream_k.steps.divisor();
  const int end = scheduler.first + scheduler.steps;
  const int own = min(max(int(all * tile_n / tiles), scheduler.first), end);
  const int own_end = min(max(int(all * (tile_n + 1) / tiles), own), end);
  const auto issued_by = [&](int last_end) {
    return [&issued, last = last_end == end] {
      if (last) issued();
    };
  };
  if (own > scheduler.first) {
    sm90_mainloop<Config>(acc, pipeline, at, s_a, s_b, own - scheduler.first, release,
                          issued_by(own), true);
  }
  if (own_end > own) {
    sm90_mainloop<Config, true>(acc, pipeline, at, s_a, s_b, own_end - own, release,
                                issued_by(own_end), true, &rows, s_ones);
  }
  if (end > own_end) {
    sm90_mainloop<Config>(acc, pipeline, at, s_a, s_b, end - own_end, release, issued_by(end),
                          true);
  }
}
#endif

}  // namespace torchweld
