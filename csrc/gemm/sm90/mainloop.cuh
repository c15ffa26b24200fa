// The mainloop of the kernel on wgmma and TMA: what a consumer warpgroup multiplies of a piece of a
// work tile, from the stages that its producer fills (kernel.cuh).
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
  static constexpr bool kPieces = kMath == GemmMath::kFloat32;
  using Result = ElementOf<kMath>;
  using T = std::conditional_t<kPieces, __nv_bfloat16, Result>;  // of what is multiplied
  static constexpr bool kAKMajor = kAKMajor_, kBKMajor = kBKMajor_, kGated = kGated_;
  static constexpr bool kSumsRows = kSumsRows_;  // of a
  static constexpr Sm90Tile kT = kSm90Tiles[kTile];
  // Of the operands, whose rows a gate takes in pairs.
  static constexpr int kHalvesA = kGated && kT.swap_ab() ? 2 : 1,
                       kHalvesB = kGated && !kT.swap_ab() ? 2 : 1;
  static constexpr int kStepElems = kKBlockBytes / int(sizeof(T));
  // A line of an MN-major tile has this much of M or N; such stretches follow one another.
  static constexpr int kLineElems = kStepElems, kStretchBytes = kStepElems * kSwizzleRowBytes;
};

// Of fp32 operands in pieces, the largest first, six pairs are multiplied, and this many steps of K
// for one pair after the other. Two bits of each name a pair's pieces, the first pair's last.
inline constexpr int kTermPairs = 6, kPieceSteps = 4;
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
                kPieceBytes = Config::kAKMajor ? 64 * kKBlockBytes : Config::kStretchBytes;
  // From one slice of K to the next.
  constexpr uint32_t kNextA = Config::kAKMajor ? 32 : 16 * kSwizzleRowBytes;
  constexpr uint32_t kNextB = Config::kBKMajor ? 32 : 16 * kSwizzleRowBytes;
  const auto descriptor = [](bool k_major, uint32_t s_at) {
    return k_major ? k_major_descriptor(s_at) : mn_major_descriptor(s_at, Config::kStretchBytes);
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
            acc[i], a + ((slice * kNextA + i * kPieceBytes) >> 4), b + (slice * kNextB >> 4),
            keeps || step > 0 || slice > 0);
        if constexpr (kSumsRows) {
          Wgmma<typename Config::T, 8>::template multiply<!Config::kAKMajor, 0>(
              rows->of_rows[i], a + ((slice * kNextA + i * kPieceBytes) >> 4),
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

// sums = a @ b^T of fp32 operands in pieces, for some steps of K.
// NOTE: tensor cores truncate when they accumulate, so their sums are short, and join the running
// ones by additions that round. Where an operand is inf or NaN its smaller pieces are 0, whose
// products may be NaN; those of the largest ones alone are right.
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
  for (int done = 0; done < steps; done += kPieceSteps) {
    const int block = min(kPieceSteps, steps - done);
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

// The same of a piece, and the sums of a's rows over the tile's share of K: the tiles side by side,
// which have the same rows, share it.
template <class Config, class Sums, class Release, class Issued>
__device__ __forceinline__ void sm90_summing_mainloop(
    const Sm90Params& p, const Sm90TileScheduler<Config::kT.cluster, false>& walk, Sums& acc,
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
  const int tile_n = int(WorkTile(p.schedule, walk.tile).tile_n), tiles = int(p.schedule.tiles_n);
  const int64_t all = p.deal.steps.divisor();
  const int end = walk.first + walk.steps;
  const int own = min(max(int(all * tile_n / tiles), walk.first), end);
  const int own_end = min(max(int(all * (tile_n + 1) / tiles), own), end);
  const auto issued_by = [&](int last_end) {
    return [&issued, last = last_end == end] {
      if (last) issued();
    };
  };
  if (own > walk.first) {
    sm90_mainloop<Config>(acc, pipeline, at, s_a, s_b, own - walk.first, release, issued_by(own),
                          true);
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
