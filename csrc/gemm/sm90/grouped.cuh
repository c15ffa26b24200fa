// The grouped matmul on wgmma and TMA: gemm_kernel with another order of the tiles. No matrix is
// padded or copied. The tensor maps span the rows of all groups, and b (or y) has a batch of one
// matrix per group.
//
// Groups of rows: the tiles of a group start at the first row of the group, which may be any row.
// The CTAs of a cluster compute different columns of the same rows and share these rows by
// multicast: if they computed different rows, more rows of the last tile of a group would be empty.
// The last tile of a group also loads rows of the next group. The kernel stores only the rows of
// the group: TMA stores the boxes that lie within it, and the warps store the rows of its last box.
//
// Groups of K: the k-blocks of a group start at its first row of a and b. The last k-block may end
// in the next group. The consumers set these rows of both operands to zero in shared memory before
// they multiply, because 0 * NaN would be NaN. A group without rows multiplies one k-block of
// zeros.
#pragma once

#include "gemm/sm90/kernel.cuh"

namespace torchweld::sm90 {

template <Grouped kDim>
struct GroupedKernelParams : KernelParams {};

#if TW_HAS_WGMMA
template <class Config, Grouped kDim>
using GroupedWorkOf =
    std::conditional_t<kDim == Grouped::kRows, GroupedRowsWork<Config::kT.swap_ab()>, GroupedKWork>;

template <class Config, Grouped kDim>
class GroupedTileScheduler {
  using Work = GroupedWorkOf<Config, kDim>;
  static constexpr int kBlockK = Config::kBlockK;

 public:
  uint32_t tile;
  int first_k_block = 0, k_blocks = 0;

  explicit __device__ __forceinline__ GroupedTileScheduler(const KernelParams& p)
      : tile(worker() - p.stream_k.workers), p_(p) {}

  static __device__ __forceinline__ uint32_t worker() { return blockIdx.x / Config::kT.cluster; }

  // Advances to the next tile of this worker. Returns false if there is none.
  __device__ __forceinline__ bool next() {
    while (true) {
      tile += p_.stream_k.workers;
      if (tile >= p_.stream_k.tiles) return false;
      const Work work(p_.gemm, p_.schedule, tile);
      if (!work.exists()) continue;
      if constexpr (kDim == Grouped::kK) {
        first_k_ = work.first_k;
        const int rows = work.end_k - work.first_k;
        k_blocks = max((rows + kBlockK - 1) / kBlockK, 1);
        rows_of_last_ = rows - (k_blocks - 1) * kBlockK;
      } else {
        k_blocks = int(p_.stream_k.k_blocks.divisor());
      }
      return true;
    }
  }

  template <int>
  __device__ __forceinline__ int first_k() const {
    return first_k_;
  }

  // Returns what a consumer does with a k-block before it multiplies it. The last k-block of a
  // group of K keeps only the rows of the group.
  template <class Shared>
  __device__ __forceinline__ auto preparation(Shared& s) const {
    return [&s, last = k_blocks - 1, rows = rows_of_last_](int k_block, int stage) {
      if constexpr (kDim == Grouped::kK) {
        if (k_block == last && rows < kBlockK) clear_rows(s.stages[stage], rows);
      }
    };
  }

  // No tile is split along K.
  __device__ __forceinline__ bool begins() const { return true; }
  __device__ __forceinline__ bool ends() const { return true; }
  template <typename Body>
  __device__ __forceinline__ void for_each_peer(const Body&) const {}

 private:
  // Sets rows `first` to kBlockK - 1 of both operands to zero. Both are MN-major, so a stage
  // consists of blocks of kBlockK rows, and a row has kSwizzleRowBytes.
  static __device__ __forceinline__ void clear_rows(char* s_stage, int first) {
    constexpr Tile kT = Config::kT;
    constexpr int kChunks = kSwizzleRowBytes / 16;
    constexpr int kBlocks = kT.stage_bytes() / Config::kLeadingBytes;
    constexpr int kThreads = 128 * kT.warpgroups_per_tile();
    const int thread = kT.pingpong ? threadIdx.x % 128 : threadIdx.x - 128;
    const int chunks = (kBlockK - first) * kChunks;
    for (int i = thread; i < kBlocks * chunks; i += kThreads) {
      const int block = i / chunks, chunk = first * kChunks + i % chunks;
      *reinterpret_cast<uint4*>(s_stage + block * Config::kLeadingBytes + chunk * 16) = uint4{};
    }
    async_fence();
    if constexpr (kT.pingpong) {
      named_barrier_wait(kWarpgroupWg0 + int(threadIdx.x) / 128 - 1, kThreads);
    } else {
      named_barrier_wait(kWarpgroupsBoth, kThreads);
    }
  }

  const KernelParams& p_;
  int first_k_ = 0, rows_of_last_ = kBlockK;
};

template <class Config, Grouped kDim>
struct ScheduleOf<Config, GroupedKernelParams<kDim>> {
  using Scheduler = GroupedTileScheduler<Config, kDim>;
  using Work = GroupedWorkOf<Config, kDim>;
  static constexpr bool kReadsMemory = true;
};

template <class Config, Grouped kDim>
struct EpilogueOf<Config, GroupedKernelParams<kDim>> {
  using Work = GroupedWorkOf<Config, kDim>;
  using Type = std::conditional_t<
      Config::kT.swap_ab(),
      SwapAbEpilogue<typename Config::Result, Config::kTile, Config::kGated, Work>,
      BoxEpilogue<typename Config::Result, Config::kTile, Config::kGated, Work>>;
};
#endif

template <GemmMath kMath, int kTile>
void launch_grouped_tile(const KernelParams& p, cudaStream_t stream) {
  static constexpr Tile kT = kTiles[kTile];
  const auto launch = [&](auto dim, auto gated, auto a_k_major, auto b_k_major) {
    using Config = KernelConfig<kMath, kTile, a_k_major.value, b_k_major.value, gated.value>;
    using Params = GroupedKernelParams<dim.value>;
    static_assert(sizeof(Shared<Config>) <= kT.shared_bytes());
    Grid grid(int64_t{p.stream_k.workers} * kT.cluster, Tile::kThreads, sizeof(Shared<Config>));
    grid.cluster = kT.cluster;
    grid.overlaps = true;
    launch_kernel(gemm_kernel<Config, Params>, grid, stream, Params{p});
  };
  using Rows = std::integral_constant<Grouped, Grouped::kRows>;
  using K = std::integral_constant<Grouped, Grouped::kK>;
  if constexpr (!kT.swap_ab()) {
    if (p.gemm.groups.dim == Grouped::kK) {
      return launch(K(), std::false_type(), std::false_type(), std::false_type());
    }
  }
  const auto launch_rows = [&](auto gated, auto b_k_major) {
    if constexpr (kT.swap_ab()) {
      launch(Rows(), gated, b_k_major, std::true_type());
    } else if constexpr (kT.unsupported_reason(true, b_k_major.value, gated.value) == nullptr) {
      launch(Rows(), gated, std::true_type(), b_k_major);
    }
  };
  dispatch_bools(launch_rows, p.gemm.epilogue.gated, p.gemm.b.k_stride == 1);
}

}  // namespace torchweld::sm90
