// Computes y = epilogue(a @ b^T) on the tensor cores of sm_80 and newer.
//
// A persistent block computes a sequence of work tiles. A work tile is a tile of y and one split of
// K. The pipeline has `stages` stages, and cp.async loads one k-block into each stage. In the
// mainloop every warp computes some rows and columns of the tile with mma.sync. Then the
// accumulators go through shared memory, 16 rows of a warp at a time. Each thread receives 8
// contiguous columns of a row, so that it can store 16 bytes at once. This exchange uses only one
// stage of the ring. Meanwhile the first k-blocks of the next work tile arrive in the other stages.
// This overlap made linear (8192, 768, 3072) a third faster. Work tiles are scheduled in bands of
// kBandRows rows, so that the running blocks cover roughly a square of y and share operands in L2.
//
// The compiler chooses the order of the instructions in the mainloop. Two variants were 4 to 6 %
// slower on linear (4096, 4096, 4096) bfloat16: one with fewer address instructions, and one with
// ldmatrix spread evenly between the mma instructions.
//
// For exact fp32, each value is split into three bf16 terms. The product of two values is computed
// as six products of terms. A product of two terms is exact (device/mma_sync.cuh), and the six
// products need as many instructions as three TF32 products. If a block meets inf, NaN or a value
// that rounds to inf, the block computes its work tile again with kHandlesNonFinite.
#pragma once

#include <type_traits>

#include "core/device.h"
#include "core/launch.h"
#include "device/dispatch.cuh"
#include "gemm/sync/finish.cuh"
#include "gemm/sync/launch.h"
#include "gemm/sync/loader.cuh"

namespace torchweld {

// The index of one of the kParts parts of a k-block, as a compile-time constant.
template <int kIndex>
using Part = std::integral_constant<int, kIndex>;

// The fragments of a warp's operands in one slice along K: kM * 16 rows of a and kN * 8 rows of b.
template <int kM, int kN>
struct Slice {
  uint32_t a[kM][4], b[kN / 2][4];

  template <class ReaderA, class ReaderB>
  __device__ __forceinline__ void load(const ReaderA& reader_a, const ReaderB& reader_b,
                                       uint32_t s_a, uint32_t s_b, int slice) {
#pragma unroll
    for (int i = 0; i < kM; ++i) reader_a.template load<true>(a[i], s_a, i, slice);
#pragma unroll
    for (int j = 0; j < kN / 2; ++j) reader_b.template load<false>(b[j], s_b, j, slice);
  }
};

struct OperandA {
  static constexpr bool is_a = true;
};
struct OperandB {
  static constexpr bool is_a = false;
};

// Computes acc += a @ b^T for two slices of fp32 operands. Each value is split into 16-bit terms.
// An mma of 16-bit terms needs 16 elements along K, so it multiplies both fp32 slices at once:
//   element t of the first fp32 slice       -> element 2t of the 16-bit slice
//   element t + 4 of the first fp32 slice   -> element 2t + 1
//   element t of the second fp32 slice      -> element 2t + 8
//   element t + 4 of the second fp32 slice  -> element 2t + 9
// This permutes K in a and in b alike, so the product is unchanged. If kHandlesNonFinite is false,
// a value that is not finite or rounds to inf sets `check` to NaN. read(r, operand, i, second)
// reads 16 rows of the operand, from the second slice if `second` is 1 and from the first slice if
// it is 0.
template <bool kHandlesNonFinite, int kM, int kN, class Read>
__device__ __forceinline__ void multiply_split(float (&acc)[kM][kN][4], const Read& read,
                                               float& check) {
  SplitFragment<4, kHandlesNonFinite> a[kM];
#pragma unroll
  for (int i = 0; i < kM; ++i) {
#pragma unroll
    for (int second = 0; second < 2; ++second) {
      uint32_t r[4];
      read(r, OperandA{}, i, second);
      a[i].set(2 * second, r[0], r[2], check);
      a[i].set(2 * second + 1, r[1], r[3], check);
    }
  }
  uint32_t raw[2][4];  // raw[s] holds the words of 16 rows of b in slice s
#pragma unroll
  for (int j = 0; j < kN; ++j) {
    const int at = j % 2 * 2;
    if (at == 0) {
      read(raw[0], OperandB{}, j / 2, 0);
      read(raw[1], OperandB{}, j / 2, 1);
    }
    SplitFragment<2, kHandlesNonFinite> b;
    b.set(0, raw[0][at], raw[0][at + 1], check);
    b.set(1, raw[1][at], raw[1][at + 1], check);
#pragma unroll
    for (int i = 0; i < kM; ++i) mma_split(acc[i][j], a[i], b);
  }
}

// Computes acc += a @ b^T for one slice of 16-bit values or TF32.
template <GemmMath kMath, int kM, int kN>
__device__ __forceinline__ void multiply(float (&acc)[kM][kN][4], const Slice<kM, kN>& slice) {
  using T = ElementOf<kMath>;
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int i = 0; i < kM; ++i) {
#pragma unroll
      for (int j = 0; j < kN; ++j) {
        mma_16816<T>(acc[i][j], slice.a[i], slice.b[j / 2][j % 2 * 2],
                     slice.b[j / 2][j % 2 * 2 + 1]);
      }
    }
  } else {
    uint32_t a[kM][4];
#pragma unroll
    for (int i = 0; i < kM; ++i) {
#pragma unroll
      for (int r = 0; r < 4; ++r) a[i][r] = round_to_tf32(__uint_as_float(slice.a[i][r]));
    }
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      const uint32_t b0 = round_to_tf32(__uint_as_float(slice.b[j / 2][j % 2 * 2]));
      const uint32_t b1 = round_to_tf32(__uint_as_float(slice.b[j / 2][j % 2 * 2 + 1]));
#pragma unroll
      for (int i = 0; i < kM; ++i) mma_1688(acc[i][j], a[i], b0, b1);
    }
  }
}

// Loads the operands of a work tile into the ring of stages.
template <GemmMath kMath, int kTile, bool kAKMajor, bool kBKMajor>
class OperandLoader {
  using T = ElementOf<kMath>;
  static constexpr SyncTile kT = kSyncTiles[kTile];
  static constexpr int kBlockK = kKBlockBytes / int(sizeof(T));
  // Whether b may be a pair concatenated along K.
  static constexpr bool kPairs = kAKMajor && !kBKMajor;

 public:
  template <class Work>
  __device__ __forceinline__ OperandLoader(const GemmParams& p, const Work& work)
      : OperandLoader(p, work, work.k_begin(p), work.k_end(p), fresh_thread()) {}

  __device__ __forceinline__ int k_blocks() const { return k_blocks_; }

  // Loads parts of the next k-block into a stage of the ring. `Parts` names the parts.
  template <class... Parts>
  __device__ __forceinline__ void load(uint32_t s_stage, Parts...) {
    (a_.template load<Parts::value>(s_stage), ...);
    (b_.template load<Parts::value>(s_stage + kT.block_m * kKBlockBytes), ...);
    if constexpr (kPairs && ((Parts::value == kParts - 1) || ...)) {
      if (--k_blocks_to_half_ == 0) b_.skip(p_->b.half_jump());
    }
  }

  // Loads the first k-blocks of the work tile, one into each stage except the last.
  __device__ __forceinline__ void start(uint32_t s_ring) {
#pragma unroll
    for (int stage = 0; stage < kT.stages - 1; ++stage) {
      if (stage < k_blocks_) {
        load(s_ring + stage * kT.stage_bytes(), Part<0>{}, Part<1>{}, Part<2>{}, Part<3>{});
      }
      copy_async_commit();
    }
  }

 private:
  template <class Work>
  __device__ __forceinline__ OperandLoader(const GemmParams& p, const Work& work, int64_t k_begin,
                                           int64_t k_end, int thread)
      : p_(&p),
        k_blocks_((int(k_end - k_begin) + kBlockK - 1) / kBlockK),
        k_blocks_to_half_(int(p.b.k_half - k_begin) / kBlockK),
        a_(source(p, p.a, work, work.first_row_of(1, 0, kT.block_m), work.rows_end(p), false),
           k_begin, k_end, thread),
        b_(source(p, p.b, work, work.tile_n * (p.epilogue.gated ? kT.block_n / 2 : kT.block_n), p.n,
                  p.epilogue.gated),
           k_begin, k_end, thread) {
    if (kPairs && p.b.k_half > 0 && k_begin >= p.b.k_half) b_.skip(p.b.half_jump());
  }

  static __device__ __forceinline__ TileSource source(const GemmParams& p,
                                                      const GemmOperand& operand,
                                                      const WorkTile& work, int64_t first,
                                                      int64_t rows, bool gated) {
    const int64_t elem = sizeof(T);
    return {static_cast<const char*>(operand.data) + work.batch * operand.batch_stride * elem,
            operand.row_stride * elem,
            operand.k_stride * elem,
            operand.half_stride * elem,
            first,
            rows,
            {gated}};
  }

  const GemmParams* p_;
  int k_blocks_;
  // If b is two matrices that are concatenated along K, this is the number of k-blocks to load
  // before the second matrix begins. Otherwise, and once the second matrix has begun, the number is
  // 0 or less.
  int k_blocks_to_half_;
  TileLoader<T, kT.block_m, kT.threads(), kAKMajor> a_;
  TileLoader<T, kT.block_n, kT.threads(), kBKMajor> b_;
};

// Computes acc = a @ b^T for a warp's rows and columns of the work tile. `loader` has already
// issued the first loads of the tile. Returns NaN if the tile must be computed again with
// kHandlesNonFinite.
template <GemmMath kMath, int kTile, bool kAKMajor, bool kBKMajor, bool kHandlesNonFinite, int kM,
          int kN>
__device__ __forceinline__ float main_loop(float (&acc)[kM][kN][4],
                                           OperandLoader<kMath, kTile, kAKMajor, kBKMajor>& loader,
                                           uint32_t s_ring) {
  using T = ElementOf<kMath>;
  constexpr SyncTile kT = kSyncTiles[kTile];
  constexpr int kStages = kT.stages, kBytesA = kT.block_m * kKBlockBytes;
  // Whether the warp reads the next slice while it multiplies the current slice. With kFloat32
  // there are too few registers for the fragments of two slices.
  constexpr bool kAhead = kMath != GemmMath::kFloat32;
  // NOTE: some kernels spill registers if they read threadIdx.x, and others if they call
  // fresh_thread(). `make kernel-check` reports spills.
  constexpr bool kFresh = sizeof(T) == 4 && kT.blocks_per_sm < 3;
  const int thread = kFresh ? fresh_thread() : threadIdx.x;
  const int lane = thread % 32, warp = thread / 32;
  const int warp_m = warp % kT.warps_m, warp_n = warp / kT.warps_m;
  const auto reader_a =
      FragmentReader<T, kT.block_m, kAKMajor>::template make<true>(lane, warp_m * kT.warp_m());
  const auto reader_b =
      FragmentReader<T, kT.block_n, kBKMajor>::template make<false>(lane, warp_n * kT.warp_n());
  Slice<kM, kN> slices[2];
  const auto read = [&](int to, int stage, int slice) {
    const uint32_t s_stage = s_ring + stage * kT.stage_bytes();
    slices[to].load(reader_a, reader_b, s_stage, s_stage + kBytesA, slice);
  };

  const int k_blocks = loader.k_blocks();
  // Waits until the next k-block has arrived and every warp has read the previous k-block.
  const auto advance = [] {
    copy_async_wait<kStages - 2>();
    __syncthreads();
  };
  const auto load = [&](int k_block, int stage, auto... parts) {
    if (k_block < k_blocks) loader.load(s_ring + stage * kT.stage_bytes(), parts...);
  };
  advance();
#pragma unroll
  for (int i = 0; i < kM; ++i) {
#pragma unroll
    for (int j = 0; j < kN; ++j) {
#pragma unroll
      for (int r = 0; r < 4; ++r) acc[i][j][r] = 0.f;
    }
  }
  if constexpr (kAhead) read(0, 0, 0);
  float check = 0.f;
  for (int k_block = 0, stage = 0, free_stage = kStages - 1; k_block < k_blocks; ++k_block) {
    const int next = stage + 1 == kStages ? 0 : stage + 1;
    if constexpr (kAhead) {
      read(1, stage, 1);
      load(k_block + kStages - 1, free_stage, Part<0>{}, Part<1>{});
      multiply<kMath>(acc, slices[0]);
      read(0, stage, 2);
      load(k_block + kStages - 1, free_stage, Part<2>{});
      multiply<kMath>(acc, slices[1]);
      read(1, stage, 3);
      load(k_block + kStages - 1, free_stage, Part<3>{});
      copy_async_commit();
      multiply<kMath>(acc, slices[0]);
      advance();
      read(0, next, 0);
      multiply<kMath>(acc, slices[1]);
    } else {
      load(k_block + kStages - 1, free_stage, Part<0>{}, Part<1>{}, Part<2>{}, Part<3>{});
      copy_async_commit();
#pragma unroll 1
      for (int slice = 0; slice < 4; slice += 2) {
        const uint32_t s_stage = s_ring + stage * kT.stage_bytes();
        const auto read_one = [&](uint32_t (&r)[4], auto operand, int i, int second) {
          if constexpr (operand.is_a) {
            reader_a.template load<true>(r, s_stage, i, slice + second);
          } else {
            reader_b.template load<false>(r, s_stage + kBytesA, i, slice + second);
          }
        };
        multiply_split<kHandlesNonFinite>(acc, read_one, check);
        __syncwarp();  // NOTE: without this call the compiler mixes two iterations; registers spill
      }
      advance();
    }
    free_stage = stage;
    stage = next;
  }
  copy_async_wait<0>();
  __syncthreads();  // all warps have read the ring; its memory may be reused
  return check;
}

// `Work` is the class of the work tiles. A block skips the tiles that do not exist.
template <GemmMath kMath, int kTile, bool kAKMajor, bool kBKMajor, class Work>
__global__ void __launch_bounds__(kSyncTiles[kTile].threads(), kSyncTiles[kTile].blocks_per_sm)
    sync_gemm_kernel(const __grid_constant__ GemmParams p, const GemmSchedule grid) {
  constexpr SyncTile kT = kSyncTiles[kTile];
  static_assert(kT.staging_fits());
  using Loader = OperandLoader<kMath, kTile, kAKMajor, kBKMajor>;
  extern __shared__ __align__(128) char s_ring[];
  const uint32_t s_base = shared_address(s_ring);
  float acc[kT.warp_m() / 16][kT.warp_n() / 8][4];
  uint32_t item = blockIdx.x;
  const auto skip = [&] {
    if constexpr (Work::kGrouped) {
      while (item < grid.items && !Work(p, grid, item).exists()) item += gridDim.x;
    }
  };
  skip();
  if (Work::kGrouped && item >= grid.items) return;
  Loader loader(p, Work(p, grid, item));
  loader.start(s_base);
  while (true) {
    const float check = main_loop<kMath, kTile, kAKMajor, kBKMajor, false>(acc, loader, s_base);
    if constexpr (kMath == GemmMath::kFloat32) {
      if (__syncthreads_or(isnan(check))) {
        loader = Loader(p, Work(p, grid, item));
        loader.start(s_base);
        main_loop<kMath, kTile, kAKMajor, kBKMajor, true>(acc, loader, s_base);
      }
    }
    uint32_t done = item;
    item += gridDim.x;
    skip();
    if (item < grid.items) {
      loader = Loader(p, Work(p, grid, item));
      loader.start(s_base);
    }
    if constexpr (!Work::kGrouped) done = item - gridDim.x;  // needs no register meanwhile
    float* s_staging = reinterpret_cast<float*>(s_ring + (kT.stages - 1) * kT.stage_bytes());
    finish<kMath, kTile>(acc, p, Work(p, grid, done), s_staging);
    if (item >= grid.items) break;
  }
}

template <GemmMath kMath, int kTile, bool kAKMajor, bool kBKMajor, class Work = WorkTile>
void launch_sync_kernel(const GemmParams& p, cudaStream_t stream) {
  constexpr SyncTile kT = kSyncTiles[kTile];
  const auto kernel = sync_gemm_kernel<kMath, kTile, kAKMajor, kBKMajor, Work>;
  const int64_t width = p.epilogue.gated ? 2 * p.n : p.n;
  const int64_t tiles_m = Work::kGrouped ? max_group_tiles(p.m, p.groups.count, kT.block_m)
                                         : (p.m + kT.block_m - 1) / kT.block_m;
  // NOTE: a gated tile has block_n / 2 columns of each half, so ceil(2n / block_n) tiles cover the
  // n columns of y.
  const int64_t tiles_n = (width + kT.block_n - 1) / kT.block_n;
  const int64_t at_once = int64_t{kT.blocks_per_sm} * device_facts().sms;
  const int64_t band_tiles = std::min(tiles_m, int64_t{kBandRows / kT.block_m});
  const int64_t batch = p.groups.dim == Grouped::kK ? p.groups.count : p.batch;
  const GemmSchedule grid(tiles_m, tiles_n, p.choice.splits, batch, band_tiles);
  // NOTE: the GPU runs at_once blocks at the same time; these blocks are one round. If the work
  // items fill only a few rounds, every item gets a block of its own, because the block scheduler
  // of the GPU then balances the last round better. Otherwise the blocks are persistent.
  constexpr int kFewRounds = 3;
  const int64_t blocks = grid.items < kFewRounds * at_once ? int64_t{grid.items} : at_once;
  launch_kernel(kernel, {blocks, kT.threads(), kT.shared_bytes()}, stream, p, grid);
}

// Launches the kernel of a tile. Each operand, a and b, may be K-major or MN-major.
template <GemmMath kMath, int kTile>
void launch_sync_tile(const GemmParams& p, cudaStream_t stream) {
  const bool a_k_major = p.a.k_stride == 1, b_k_major = p.b.k_stride == 1;
  if (a_k_major && b_k_major) return launch_sync_kernel<kMath, kTile, true, true>(p, stream);
  if (a_k_major) return launch_sync_kernel<kMath, kTile, true, false>(p, stream);
  if (b_k_major) return launch_sync_kernel<kMath, kTile, false, true>(p, stream);
  launch_sync_kernel<kMath, kTile, false, false>(p, stream);
}

template <GemmMath kMath, int kTile>
void launch_sync_grouped(const GemmParams& p, cudaStream_t stream) {
  if (p.groups.dim == Grouped::kK) {
    launch_sync_kernel<kMath, kTile, false, false, GroupedKWork>(p, stream);
  } else if (p.b.k_stride == 1) {
    launch_sync_kernel<kMath, kTile, true, true, GroupedRowsWork<>>(p, stream);
  } else {
    launch_sync_kernel<kMath, kTile, true, false, GroupedRowsWork<>>(p, stream);
  }
}

template <GemmMath kMath, SyncSize kSize>
void launch_sync_size(const GemmParams& p, cudaStream_t stream) {
  dispatch_index<kSyncTileCount>(p.choice.tile, [&](auto tile) {
    constexpr SyncTile kT = kSyncTiles[tile.value];
    if constexpr (kT.supports_dtype(kMath) && kT.size() == kSize) {
      if (p.groups.dim == Grouped::kNone) {
        launch_sync_tile<kMath, tile.value>(p, stream);
      } else if constexpr (kT.supports_groups()) {
        launch_sync_grouped<kMath, tile.value>(p, stream);
      }
    }
  });
}

}  // namespace torchweld
