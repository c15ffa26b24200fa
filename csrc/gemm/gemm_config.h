// The tiles of the matmul kernels and which one a product takes. Pure host code: the launchers,
// torchweld.explain and the CPU tests read the same table.
#pragma once

#include <algorithm>
#include <cstdint>

namespace torchweld {

// How operands are multiplied. kFloat32 splits them into three bf16 pieces: fp32 accuracy on tensor
// cores.
enum class GemmMath : int8_t { kFloat16, kBFloat16, kTf32, kFloat32 };

constexpr int gemm_elem_size(GemmMath math) {
  return math == GemmMath::kFloat16 || math == GemmMath::kBFloat16 ? 2 : 4;
}

// A step of the main loop takes this much of K from every row: 64 16-bit or 32 fp32 elements.
inline constexpr int kGemmStepBytes = 128;

struct GemmTile {
  int block_m, block_n;  // of the product; of a gated one block_n counts both halves
  int warps_m, warps_n;
  int stages;  // of the ring in shared memory
  int blocks_per_sm;
  float rate;        // of the tensor cores, with the SM full; measured against the first tile
  float rate_alone;  // the same with one block on the SM
  // What a tile costs beside its steps, in steps: the start and the stores, and the mathematics of
  // an activation or a gate. Less where blocks of an SM hide each other's.
  float fixed_steps, pointwise_steps;
  bool fp32;  // a tile of kFloat32, whose split operands need registers

  constexpr bool suits(GemmMath math) const { return fp32 == (math == GemmMath::kFloat32); }
  constexpr int threads() const { return warps_m * warps_n * 32; }
  constexpr int warp_m() const { return block_m / warps_m; }
  constexpr int warp_n() const { return block_n / warps_n; }
  constexpr int stage_bytes() const { return (block_m + block_n) * kGemmStepBytes; }
  constexpr int shared_bytes() const { return stages * stage_bytes(); }
  // Every warp stages 16 rows of sums at a time, in the ring's last stage.
  constexpr bool staging_fits() const {
    return warps_m * warps_n * 16 * warp_n() * 4 <= stage_bytes();
  }
};

inline constexpr GemmTile kGemmTiles[] = {
    {256, 128, 4, 2, 3, 1, 1.00f, 1.00f, 3.2f, 2.4f, false},
    {128, 128, 2, 2, 3, 2, 0.94f, 0.60f, 2.3f, 1.8f, false},
    {128, 64, 2, 2, 3, 3, 0.78f, 0.45f, 2.0f, 1.5f, false},
    {64, 64, 2, 2, 3, 3, 0.63f, 0.28f, 4.5f, 5.0f, false},
    {64, 128, 2, 2, 3, 2, 1.00f, 0.75f, 2.0f, 1.0f, true},
    {64, 64, 2, 2, 3, 2, 0.86f, 0.60f, 2.0f, 1.0f, true},
};
inline constexpr int kGemmTileCount = sizeof(kGemmTiles) / sizeof(kGemmTiles[0]);

// Floats in a row of split sums: y's columns filled up to vectors, twice where gated.
constexpr int64_t gemm_sum_width(int64_t n, bool gated) {
  return (n + 7) / 8 * 8 * (gated ? 2 : 1);
}

struct GemmProblem {
  int64_t m, n, k, batch;  // n is y's width, half of b's rows where gated
  bool gated, pointwise;   // a gate; a gate or an activation
  GemmMath math;
  int sms;           // of the device
  int shared_limit;  // bytes of shared memory that one block may have
};

struct GemmChoice {
  int tile;         // index into kGemmTiles
  int splits;       // of K; their sums are added in a fixed order
  int64_t k_split;  // elements of K in a split, a multiple of a step

  int64_t workspace_floats(const GemmProblem& p) const {
    return splits == 1 ? 0 : splits * p.batch * p.m * gemm_sum_width(p.n, p.gated);
  }
};

// Source of the model: tensor-core time of the busiest SM, and the extra traffic of split sums.
inline GemmChoice choose_gemm(const GemmProblem& p) {
  constexpr int kSplits[] = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32};
  constexpr int64_t kMaxSteps = int64_t{1} << 24;  // the kernels count a split's K in 32 bits
  constexpr double kMacsPerSecond = 0.9e12;        // of one SM, 16-bit
  constexpr double kBytesPerSecond = 3e12, kLaunchSeconds = 3e-6;
  const int elem = gemm_elem_size(p.math);
  const int step = kGemmStepBytes / elem;
  const int64_t steps = std::max<int64_t>(1, (p.k + step - 1) / step);
  const int64_t width = p.gated ? 2 * p.n : p.n;
  const double slower = p.math == GemmMath::kFloat32 ? 7 : p.math == GemmMath::kTf32 ? 2 : 1;
  GemmChoice best{};
  double best_time = -1;
  for (int i = 0; i < kGemmTileCount; ++i) {
    const GemmTile& tile = kGemmTiles[i];
    if (!tile.suits(p.math) || tile.shared_bytes() > p.shared_limit) continue;
    const int64_t tiles =
        (p.m + tile.block_m - 1) / tile.block_m * ((width + tile.block_n - 1) / tile.block_n);
    for (const int splits : kSplits) {
      if (splits > 1 && steps < 4 * splits) break;
      const int64_t steps_split = (steps + splits - 1) / splits;
      if ((splits - 1) * steps_split >= steps) continue;  // the last one would be empty
      if (steps_split > kMaxSteps) continue;
      const int64_t blocks = tiles * splits * p.batch;
      const int64_t load = (blocks + p.sms - 1) / p.sms;  // blocks on the busiest SM
      const double rate = load >= tile.blocks_per_sm
                              ? tile.rate
                              : tile.rate_alone + (tile.rate - tile.rate_alone) * (load - 1) /
                                                      std::max(1, tile.blocks_per_sm - 1);
      const double fixed = tile.fixed_steps + (p.pointwise ? tile.pointwise_steps : 0);
      const double macs = double(tile.block_m) * tile.block_n * step * (steps_split + fixed);
      double time = load * macs * slower / (rate * kMacsPerSecond);
      if (splits > 1) {
        time += kLaunchSeconds + 2.0 * splits * p.batch * p.m * width * 4 / kBytesPerSecond;
      }
      if (best_time < 0 || time < best_time) {
        best_time = time;
        best = {i, splits, steps_split * step};
      }
    }
  }
  return best;
}

}  // namespace torchweld
