// The tiles of the engine on wgmma and TMA, for Hopper. This is pure host code.
#pragma once

#include <algorithm>

#include "core/index.h"
#include "core/refusal.h"
#include "gemm/problem.h"

namespace torchweld::sm90 {

// wgmma multiplies 16-bit values or TF32 values, and TF32 operands must be K-major. For TF32,
// operands.cu makes K-major copies of MN-major operands before the product, and TMA rounds the
// values while it loads them. For exact fp32, operands.cu writes K-major copies with three bf16
// terms per value.
constexpr int elem_bytes(GemmMath math) { return math == GemmMath::kTf32 ? 4 : 2; }
constexpr int bf16x3_terms(GemmMath math) { return math == GemmMath::kFloat32 ? 3 : 1; }
constexpr bool must_be_k_major(GemmMath math) { return gemm_elem_size(math) == 4; }
constexpr bool writes_operand(GemmMath math, bool k_major) {
  return math == GemmMath::kFloat32 || (math == GemmMath::kTf32 && !k_major);
}

constexpr int k_block_size(GemmMath math) { return kKBlockBytes / elem_bytes(math); }
constexpr int64_t count_k_blocks(const GemmProblem& p) {
  return divide_up(p.k, k_block_size(p.math));
}

// The indices of the tiles in kTiles. csrc/instantiations.py uses their names.
enum TileIndex : int {
  kPingPong128x128Cluster2,
  kPingPong128x128,
  kCooperative128x320Cluster2,
  kCooperative128x256Cluster2,
  kCooperative128x192Cluster2,
  kCooperative128x96,
  kPingPong64x64,
  kSwapAb128x32,
  kSwapAb128x64,
  kBf16x3Cooperative128x128
};

// A CTA has a producer warp and two consumer warpgroups. In ping-pong tiles each warpgroup computes
// a tile of its own, and one warpgroup runs its epilogue while the other warpgroup multiplies. In
// cooperative tiles the warpgroups share one tile. A swap_ab tile is a tile of the transposed
// product b @ a^T, for few rows of a.
struct Tile {
  TileIndex index;
  // The number of rows of wgmma's operands A and B in a tile. In a gated product, the number for b
  // includes the rows of both halves.
  int block_m, block_n;
  int stages;   // the number of pipeline stages in shared memory
  int cluster;  // the number of CTAs per cluster; they share rows of b by multicast
  bool pingpong;
  int boxes;  // the number of boxes per warp for TMA stores; 0 for swap_ab tiles
  // Times in microseconds. k_block_us is the time of one k-block. tile_us is the time of a tile in
  // addition to its k-blocks. An activation adds pointwise_us to tile_us. In ping-pong tiles, the
  // mainloop of the other warpgroup hides a part of the activation; pointwise_us is only the rest.
  // Stream-K adds stream_us once, and partial_us for each partial of a tile. The times of 16-bit
  // tiles are fitted to products with sizes from common models. On average, the chosen tile needs
  // more time than the fastest one:
  //   690 products one at a time on an H100                      1.2 %
  //   40 long products, each repeated for 25 ms, on an H100      1.9 %
  //   621 products of 64 to 2048 rows on an H200                 1.3 %
  //   546 products of 1 to 64 rows on an H200                    1.0 %
  float k_block_us, tile_us, pointwise_us, stream_us, partial_us;
  bool fp32 = false;  // whether the tile is for kFloat32, which needs two sets of accumulators

  static constexpr int kWarpgroups = 2, kConsumerThreads = 128 * kWarpgroups;
  static constexpr int kThreads = 128 + kConsumerThreads;

  // The number of wgmmas, of 64 rows each, that cover a warpgroup's rows of a tile.
  constexpr int wgmma_m_tiles() const { return block_m / 64 / (pingpong ? 1 : kWarpgroups); }
  // The number of columns of a box. A row of a box has 128 bytes, or 64 bytes if the elements have
  // 16 bits and either block_n is not a multiple of 64 or the accumulators leave registers only for
  // few values of a box.
  constexpr int box_columns(int elem_bytes) const {
    return elem_bytes == 2 && block_n % 64 == 0 && block_n <= 256 ? 64 : 32;
  }
  constexpr int stage_bytes() const { return (block_m + block_n) * kKBlockBytes; }
  constexpr int box_bytes() const { return 16 * box_columns(2) * 2; }
  constexpr bool swap_ab() const { return boxes == 0; }
  // The number of bytes of the staging memory. It holds the boxes of all warps. In a swap_ab tile
  // it holds the right halves of gated results instead.
  constexpr int staging_bytes() const {
    return swap_ab() ? 64 * block_n * 4 : 8 * boxes * box_bytes();
  }
  // The number of bytes of shared memory of a CTA, rounded up to whole KiB. This memory holds the
  // stages and their barriers, the staging memory and the bias of two tiles.
  constexpr int shared_bytes() const {
    const int bytes = stages * (stage_bytes() + 16) + staging_bytes() + kWarpgroups * block_n * 4;
    return (bytes + 1023) / 1024 * 1024;
  }
  // tiles_m and tiles_n return the number of tiles along the rows of wgmma's operand A and along
  // the rows of operand B. The product has m rows of a and `width` rows of b. The tiles of a
  // cluster count as one tile.
  constexpr int64_t tiles_m(int64_t m, int64_t width) const {
    const int64_t rows = int64_t{block_m} * cluster;
    return ((swap_ab() ? width : m) + rows - 1) / rows;
  }
  constexpr int64_t tiles_n(int64_t m, int64_t width) const {
    return ((swap_ab() ? m : width) + block_n - 1) / block_n;
  }
  constexpr int64_t tiles(const GemmProblem& p) const {
    return tiles_m(p.m, p.width()) * tiles_n(p.m, p.width()) * p.batch;
  }
  // The maximum number of CTAs of a cluster that may split the K of one tile. Every CTA must have
  // an output slice of at least four values per thread.
  constexpr int max_split_cluster() const { return swap_ab() ? block_n / 8 : 1; }
  // The number of warpgroups of a CTA that compute a tile together.
  constexpr int warpgroups_per_tile() const { return pingpong ? 1 : kWarpgroups; }
  // Whether there are kernels of this tile for the arithmetic `math`.
  constexpr bool supports_dtype(GemmMath math) const {
    if (math == GemmMath::kTf32) return !fp32 && !swap_ab() && block_n % 128 == 0;
    return fp32 == (math == GemmMath::kFloat32);
  }
  // Returns why there is no kernel of this tile for a layout, or null if there is a kernel.
  constexpr const char* unsupported_reason(bool a_k_major, bool b_k_major, bool gated) const {
    if (swap_ab()) {
      return a_k_major ? nullptr : "swap_ab tiles need a K-major first operand";
    }
    if (!b_k_major && block_n % 64 != 0) {
      return "an MN-major second operand needs a tile width that is a multiple of 64";
    }
    if (gated && !pingpong && !fp32) {
      return "a gated product needs a ping-pong tile, which hides its epilogue";
    }
    if (gated && block_n < 128) return "a gated product needs a tile of at least 128 columns";
    if (gated && !a_k_major) return "a gated product needs a K-major first operand";
    return nullptr;
  }
  // The number of rows of a tile in a product with groups of rows.
  constexpr int group_rows() const { return swap_ab() ? block_n : block_m; }
  // The number of columns of y in the tiles of a cluster, in a product with groups of rows.
  constexpr int group_columns(int halves) const {
    return (swap_ab() ? block_m : block_n * cluster) / halves;
  }
  // Whether there are kernels of this tile for grouped products.
  constexpr bool supports_groups(GemmMath math) const {
    return gemm_elem_size(math) == 2 &&
           (index == kPingPong128x128Cluster2 || index == kCooperative128x256Cluster2 ||
            index == kPingPong64x64 || swap_ab());
  }
  // Whether this tile has kernels that also compute the sum of each row of a. Such kernels exist
  // only for the layout of a weight gradient, dy^T @ x. In that product these sums are the gradient
  // of the bias.
  constexpr bool supports_dbias(GemmMath math, bool a_k_major, bool b_k_major, bool gated) const {
    return !swap_ab() && !gated && !a_k_major && !b_k_major && !must_be_k_major(math) &&
           unsupported_reason(a_k_major, b_k_major, gated) == nullptr;
  }
  // NOTE: tensor cores truncate when they add. If more than kMaxKBlocks k-blocks of values with the
  // same sign were summed, the truncation would change digits of a 16-bit result.
  constexpr bool supports_dbias(const GemmProblem& p) const {
    constexpr int64_t kMaxKBlocks = 2048;
    return p.batch == 1 && supports_dbias(p.math, p.a_k_major, p.b_k_major, p.gated) &&
           count_k_blocks(p) <= kMaxKBlocks * tiles_n(p.m, p.width());
  }
};

// Each entry lists index, block_m, block_n, stages, cluster, pingpong, boxes, k_block_us, tile_us,
// pointwise_us, stream_us, partial_us and fp32.
inline constexpr Tile kTiles[] = {
    {kPingPong128x128Cluster2, 128, 128, 6, 2, true, 2, 0.294f, 1.08f, 0.15f, 1.28f, 3.39f},
    {kPingPong128x128, 128, 128, 6, 1, true, 2, 0.281f, 1.0f, 0.2f, 3.3f, 0.48f},
    {kCooperative128x320Cluster2, 128, 320, 3, 2, false, 4, 0.923f, 5.3f, 2.9f, 2.2f, 0.4f},
    {kCooperative128x256Cluster2, 128, 256, 4, 2, false, 2, 0.716f, 3.1f, 2.3f, 4.3f, 0.1f},
    {kCooperative128x192Cluster2, 128, 192, 5, 2, false, 1, 0.503f, 2.8f, 1.8f, 4.3f, 0.2f},
    {kCooperative128x96, 128, 96, 7, 1, false, 2, 0.283f, 0.82f, 1.0f, 3.8f, 0.1f},
    {kPingPong64x64, 64, 64, 13, 1, true, 1, 0.125f, 0.53f, 0.4f, 1.35f, 0.51f},
    {kSwapAb128x32, 128, 32, 10, 1, false, 0, 0.197f, 0.64f, 0.2f, 1.29f, 1.52f},
    {kSwapAb128x64, 128, 64, 8, 1, false, 0, 0.243f, 3.2f, 0.8f, 0.39f, 1.77f},
    {kBf16x3Cooperative128x128, 128, 128, 6, 1, false, 2, 2.1f, 3.0f, 2.0f, 2.2f, 1.3f, true},
};
inline constexpr int kTileCount = sizeof(kTiles) / sizeof(kTiles[0]);

constexpr bool tiles_are_in_order() {
  for (int i = 0; i < kTileCount; ++i) {
    if (kTiles[i].index != i) return false;
  }
  return true;
}
static_assert(tiles_are_in_order());

// The stream-K part of the schedule. The k-blocks of the last `tiles` tiles are distributed evenly
// over all workers, so that no worker is idle during the last round. Source: M. Osama et al.,
// "Stream-K", 2023.
struct StreamKPlan {
  int64_t tiles = 0, workers = 1;
  int split_cluster = 1;  // the number of CTAs of a cluster that split the K of one tile, or 1
};

// Returns the stream-K schedule of a product. If the last round has fewer tiles than there are
// workers, stream-K covers the tiles of the last round and of the round before it.
inline StreamKPlan plan_stream_k(const Tile& tile, int64_t tiles, int64_t k_blocks,
                                 const DeviceFacts& device, bool streams) {
  constexpr int64_t kMinKBlocks = 4;  // the minimum number of k-blocks per worker
  const int64_t workers = device.max_active_clusters(tile.cluster), last = tiles % workers;
  if (!streams || last == 0) return {0, std::min(tiles, workers)};
  if (tiles > workers) return {last + workers, workers};
  const int64_t max_workers = std::clamp<int64_t>(tiles * k_blocks / kMinKBlocks, 1, workers);
  // A cluster splits the K of a tile only into ranges of at most this many k-blocks. In longer
  // ranges the CTAs of the cluster drift apart and wait for each other.
  constexpr int64_t kMaxSplitClusterKBlocks = 32;
  for (const int split_cluster : {8, 4, 3, 2}) {
    if (!device.clusters || split_cluster > tile.max_split_cluster()) continue;
    if (tiles > device.max_active_clusters(split_cluster) || split_cluster * tiles > max_workers)
      continue;
    if (k_blocks <= kMaxSplitClusterKBlocks * split_cluster)
      return {tiles, split_cluster * tiles, split_cluster};
  }
  // Prefer a number of workers for which the range of each worker lies within one tile.
  int64_t splits = max_workers / tiles;
  while (splits > 1 && k_blocks % splits != 0) --splits;
  return {tiles, splits > 1 ? splits * tiles : max_workers};
}

// Returns the number of floats in the partial sums of all workers.
inline int64_t workspace_floats(const GemmProblem& p, const Tile& tile) {
  const StreamKPlan stream = plan_stream_k(tile, tile.tiles(p), count_k_blocks(p), p.device, true);
  if (stream.tiles == 0) return 0;
  // A wgmma with N = 8 computes the sum of each row of a, so these sums need 8 columns of
  // accumulators.
  const int dbias_columns = tile.supports_dbias(p) ? 8 : 0;
  return stream.workers * tile.cluster * tile.block_m * (tile.block_n + dbias_columns);
}

inline Refusal tile_refusal(const GemmProblem& p, const Tile& tile, bool streams) {
  constexpr int64_t kMaxSize = (int64_t{1} << 31) - 512;  // TMA coordinates have 32 bits
  if (!p.device.wgmma || !p.device.tma) return "the GPU, or the code built for it, has no wgmma";
  if (!tile.supports_dtype(p.math)) {
    return tile.fp32 ? "the tile is only for float32, which has two sets of accumulators"
                     : "the tile has no kernel for the operands' dtype";
  }
  const bool needs_k_major = must_be_k_major(p.math);
  if (const char* reason = tile.unsupported_reason(needs_k_major || p.a_k_major,
                                                   needs_k_major || p.b_k_major, p.gated)) {
    return reason;
  }
  if (tile.shared_bytes() > p.device.shared_limit) {
    return too_much_shared_memory(tile.shared_bytes(), p.device.shared_limit);
  }
  if (p.normed) return kNoNorm;
  if (p.k == 0) return "there is nothing to multiply";
  if (p.grouped != Grouped::kNone) {
    if (!tile.supports_groups(p.math)) return "the tile has no kernel for a grouped product";
    if (streams) return "the tiles of a grouped product are not split";
    if (p.grouped == Grouped::kRows ? !p.a_k_major : p.a_k_major || p.b_k_major) {
      return kGroupedLayout;
    }
  }
  if (p.m > kMaxSize || p.width() > kMaxSize || p.k > kMaxSize || p.batch > kMaxSize) {
    return {"no tensor map has more than {} elements in a dimension", kMaxSize};
  }
  // All streamed tiles together must have fewer than kMaxStreamed k-blocks. The number of streamed
  // tiles is at most twice the number of SMs.
  constexpr int64_t kMaxStreamed = int64_t{1} << 31;
  if (streams && double(count_k_blocks(p)) * 2 * p.device.sms >= kMaxStreamed) {
    return {"the streamed tiles would have {} k-blocks or more", kMaxStreamed};
  }
  const double tiles = (double(p.m) / tile.block_m + 2) *
                       (static_cast<double>(p.width()) / tile.block_n + 1) *
                       static_cast<double>(p.batch);
  return grid_fits(tiles) ? Refusal() : "more than 2^31 - 1 tiles";
}

// Estimates the time of the busiest SM, over all its rounds. The estimate leaves out the launch and
// the first loads, because they take the same time in every engine.
inline double tile_seconds(const GemmProblem& given, const Tile& tile, bool streams) {
  const GemmProblem p =
      given.without_groups(tile.group_rows(), tile.group_columns(given.gated ? 2 : 1));
  const double k_blocks = static_cast<double>(count_k_blocks(p));
  const double beside_us = tile.tile_us + (p.pointwise ? tile.pointwise_us : 0);
  const double tile_us = k_blocks * tile.k_block_us + beside_us;
  const double columns = static_cast<double>(p.k) * static_cast<double>(p.batch);
  // The number of elements of both operands.
  const double elems = static_cast<double>(p.m + p.width()) * columns;
  const StreamKPlan stream =
      plan_stream_k(tile, tile.tiles(p), count_k_blocks(p), p.device, streams);
  const int64_t whole = tile.tiles(p) - stream.tiles;
  double us = static_cast<double>((whole + stream.workers - 1) / stream.workers) * tile_us;
  if (stream.tiles > 0) {
    const double share = static_cast<double>(stream.tiles) / static_cast<double>(stream.workers);
    const double partials = std::max(1.0, 1 / share);
    // In stream-K the CTAs work on different k-blocks, so they share no loads. This slows a product
    // down more if its operands don't fit in L2. If there are more tiles than workers, the CTAs
    // also drift apart, and they drift further if K is longer: (8192, 16384) x (16384, 4096) needs
    // 1507 us with stream-K and 1403 us with whole tiles.
    constexpr double kL2Bytes = 50e6, kDrift = 0.001, kShortSum = 146, kMaxDrift = 0.05;
    const double kWithinL2 = tile.swap_ab() || tile.fp32 ? 1 : 1.073;
    const double drift = tile.tiles(p) > stream.workers
                             ? std::clamp(kDrift * (k_blocks - kShortSum), 0.0, kMaxDrift)
                             : 0.0;
    const double kBeyondL2 = tile.fp32 ? 1.45 : 1.1 + drift;
    const double bytes = elems * bf16x3_terms(p.math) * elem_bytes(p.math);
    const double k_block_us = tile.k_block_us * (bytes > kL2Bytes ? kBeyondL2 : kWithinL2);
    // The factor (k_blocks - 1) / k_blocks is 0 if K is a single k-block, because no tile then has
    // partials.
    us += share * (k_blocks * k_block_us + beside_us) + std::max(0.0, 1 - share) * beside_us;
    constexpr double kClusterReduceUs = 1.5;
    us += stream.split_cluster > 1
              ? kClusterReduceUs
              : (tile.stream_us + tile.partial_us * partials) * (k_blocks - 1) / k_blocks;
  }
  // During a sequence of long products, as in the layers of a model, the GPU lowers its clock to
  // limit its power. CTAs share no loads in tiles without clusters. Therefore products with such
  // tiles draw more power, unless their tiles are half empty. Ping-pong tiles load 1.5 times as
  // many bytes per element of y as tiles of 256 columns. Therefore products with ping-pong tiles
  // draw more power, but only if the mainloop is long compared with the epilogue and all SMs have a
  // tile.
  constexpr double kLongUs = 28.5, kLonger = 1.125, kPingPongLonger = 1.19;
  constexpr int64_t kLongSum = 21;
  const bool draws_power = !tile.swap_ab() && !tile.fp32 && p.width() >= tile.block_n;
  if (draws_power && tile.cluster == 1 && us > kLongUs) us *= kLonger;
  if (draws_power && tile.pingpong && count_k_blocks(p) >= kLongSum &&
      tile.tiles(p) >= p.device.max_active_clusters(tile.cluster)) {
    us *= kPingPongLonger;
  }
  // NOTE: the power limit slows products that take more than kSustainedUs, but short measurements
  // do not show this. Times of a product that is repeated for 20 to 50 ms on an H100:
  //                        ping-pong tiles   tiles of 256 columns
  //   (4096, 4096, 4096)        201 us              183 us
  //   (8192, 4096, 16384)      1637 us             1397 us
  // On an H200, ping-pong tiles make a step of a Llama model with 1.2 B parameters 2.8 % slower.
  constexpr double kSustainedUs = 89, kSustainedPingPong = 1.1, kSustained192 = 1.06;
  if (draws_power && us > kSustainedUs && tile.block_n < 256) {
    us *= tile.pingpong ? kSustainedPingPong : kSustained192;
  }
  const double written =
      columns * static_cast<double>((writes_operand(p.math, p.a_k_major) ? p.m : 0) +
                                    (writes_operand(p.math, p.b_k_major) ? p.width() : 0));
  if (written > 0) {
    constexpr double kBytesPerUs = 3e6, kWriteUs = 7;
    us += kWriteUs + written * (4 + bf16x3_terms(p.math) * elem_bytes(p.math)) / kBytesPerUs;
  }
  return us * 1e-6;
}

}  // namespace torchweld::sm90
