// Computes y = epilogue(a @ b^T) for up to 16 rows of a, for example the tokens of a decode step.
// Unless b is small, the kernel takes about as long as one read of b. If b is small, the start and
// the end of the kernel dominate its time.
//
// Each block computes a few columns of y and processes all of K for them. Warp w multiplies
// k-blocks w, w + kWarps, ... Each warp loads its k-blocks asynchronously into a ring of stages.
// Every warp has a ring of its own, so no warp waits for another warp. a is the 16-row A operand of
// mma.sync. At the end the block adds up the accumulators of its warps through shared memory, in
// the order of the warps.
//
// If the rows of a are short, the kernel can apply a norm to them before the product. Every block
// computes the statistics of all rows while the first k-blocks of the block arrive. Later the block
// normalises the fragments of a in registers.
//
// On Hopper the kernel starts while the previous kernel ends (programmatic dependent launch, PDL).
// A prefetch of b into L2 before griddep_wait does not help. With this prefetch, (M, K, N) =
// (16, 2048, 6144) needed 10.8 us; without it, 9.9 us.
#pragma once

#include "core/launch.h"
#include "device/dispatch.cuh"
#include "device/reduce.cuh"
#include "device/sm90/dependent_launch.cuh"
#include "device/statistics.cuh"
#include "gemm/element.cuh"
#include "gemm/epilogue.cuh"
#include "gemm/rows/chain_kernel.cuh"
#include "gemm/rows/launch.h"

namespace torchweld {

template <typename T_, int kTile, bool kBKMajor_, bool kGated_>
struct RowsConfig {
  using T = T_;
  static constexpr RowsTile kT = kRowsTiles[kTile];
  static constexpr bool kBKMajor = kBKMajor_, kGated = kGated_;
  static constexpr int kRows = RowsTile::kRows, kWarps = RowsTile::kWarps;
  static constexpr int kColumns = kT.columns, kStages = kT.stages;
  // kHalves is the number of halves of b. kOwn is the number of columns of y that a block computes.
  static constexpr int kHalves = kGated ? 2 : 1, kOwn = kColumns / kHalves;
  static constexpr int kBlockK = kKBlockBytes / sizeof(T), kChunk = 16 / sizeof(T);

  struct Stage {
    char b[kColumns * kKBlockBytes];
    char a[kRows * kKBlockBytes];
    char scale[kKBlockBytes], shift[kKBlockBytes];
  };
  struct Shared {
    union {
      Stage rings[kWarps][kStages];
      // The 4 padding columns put consecutive rows in different banks.
      float sums[kWarps][kRows][kColumns + 4];
    };
    RowNormaliser norm[kRows];
  };
};

// Loads the k-blocks of one warp into the warp's ring.
template <typename Config>
class RowsLoader {
  using T = typename Config::T;
  using Stage = typename Config::Stage;
  static constexpr int kChunk = Config::kChunk, kBlockK = Config::kBlockK, kOwn = Config::kOwn;
  // The number of 16-byte chunks in a row of b's tile in shared memory. If b is K-major, a row of
  // the tile runs along K. Otherwise it runs along N.
  static constexpr int kRowChunks = Config::kBKMajor ? 8 : Config::kColumns / kChunk;
  static constexpr int kTileRows = Config::kBKMajor ? Config::kColumns : kBlockK;
  static constexpr int kRowStep = kWarp / kRowChunks, kLoads = kTileRows / kRowStep;

 public:
  __device__ __forceinline__ RowsLoader(const GemmParams& p, int64_t column, int lane)
      : p_(p), lane_(lane), k_(int(p.k)) {
    const GemmOperand& b = p.b;
    const T* g_b = static_cast<const T*>(b.data);
    const int chunk = lane % kRowChunks, row = lane / kRowChunks;
    if constexpr (Config::kBKMajor) {
      row_stride_ = b.row_stride;
      from_[0] = g_b + (column + row) * row_stride_ + chunk * kChunk;
      from_[1] = from_[0] + b.half_stride;
      left_ = int(min(p.n - column - row, int64_t{kOwn}));
    } else {
      const int own = chunk % (kOwn / kChunk) * kChunk, right = chunk / (kOwn / kChunk);
      from_[0] = from_[1] =
          g_b + row * b.k_stride + (column + own) * b.row_stride + right * b.half_stride;
      left_ = column + own < p.n ? 1 : 0;
    }
    from_a_ = static_cast<const T*>(p.a.data) + lane / 8 * p.a.row_stride + lane % 8 * kChunk;
    rows_left_ = int(p.m) - lane / 8;
  }

  // Loads a k-block into a stage of the ring and commits the loads as one cp.async group. If
  // k_block is past the end of K, the group is empty.
  __device__ __forceinline__ void load(int k_block, Stage& s) const {
    const int first = k_block * kBlockK;
    if (first < k_) {
      const uint32_t s_b = shared_address(s.b), s_a = shared_address(s.a);
      const int chunk = lane_ % kRowChunks, row = lane_ / kRowChunks;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        copy_async_16_if(s_b + rows_chunk<kRowChunks>(row + i * kRowStep, chunk) * 16,
                         b_at(k_block, i), there(i, first));
      }
#pragma unroll
      for (int i = 0; i < Config::kRows / 4; ++i) {
        const bool is = i * 4 < rows_left_ && first + lane_ % 8 * kChunk < k_;
        copy_async_16_if(s_a + rows_chunk<8>(lane_ / 8 + i * 4, lane_ % 8) * 16,
                         from_a_ + i * 4 * p_.a.row_stride + first, is);
      }
      if (p_.norm.given && lane_ < 16) {
        const void* vector = lane_ < 8 ? p_.norm.scale : p_.norm.shift;
        const int at = first + lane_ % 8 * kChunk;
        const int elems = vector != nullptr ? min(max(k_ - at, 0), kChunk) : 0;
        copy_async_16(shared_address(s.scale) + lane_ * 16,
                      elems > 0 ? static_cast<const T*>(vector) + at : p_.a.data,
                      elems * int(sizeof(T)));
      }
    }
    copy_async_commit();
  }

 private:
  __device__ __forceinline__ const T* b_at(int k_block, int i) const {
    if constexpr (Config::kBKMajor) {
      const int row = i * kRowStep;
      return from_[row / kOwn] + row % kOwn * row_stride_ + k_block * kBlockK;
    }
    const int64_t k = int64_t{k_block} * kBlockK;
    const T* g_block = from_[0] + k * p_.b.k_stride;
    if (!Config::kGated && p_.b.k_half > 0 && k >= p_.b.k_half) g_block += p_.b.half_jump();
    return g_block + i * kRowStep * p_.b.k_stride;
  }
  __device__ __forceinline__ bool there(int i, int first) const {
    if constexpr (Config::kBKMajor) {
      return i * kRowStep % kOwn < left_ && first + lane_ % kRowChunks * kChunk < k_;
    }
    return left_ > 0 && first + lane_ / kRowChunks + i * kRowStep < k_;
  }

  const GemmParams& p_;
  int lane_, k_;
  // from_[0] is the address of the first chunk that this lane loads from the left half of b, and
  // from_[1] is the address for the right half. If b is MN-major, a lane loads chunks of only one
  // half, and both addresses are equal.
  const T* from_[2];
  const T* from_a_;
  int64_t row_stride_ = 0;
  int left_, rows_left_;
};

// Computes the mean and rstd of every row of a for the norm. Each warp handles kOf rows and holds
// their values in registers.
template <typename Config>
class RowsStatistics {
  using T = typename Config::T;
  static constexpr int kChunk = Config::kChunk, kOf = Config::kRows / Config::kWarps;
  static constexpr int kChunks = RowsTile::kMaxNormed / (kWarp * kChunk);

 public:
  __device__ __forceinline__ void load(const GemmParams& p) {
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      if (column(j) >= p.k) break;
#pragma unroll
      for (int i = 0; i < kOf; ++i) {
        const int64_t at = min(int64_t{row(i)}, p.m - 1) * p.a.row_stride + column(j);
        x_[i][j] = load_vec<T, kChunk>(static_cast<const T*>(p.a.data) + at);
      }
    }
  }

  __device__ __forceinline__ void share(const GemmParams& p, RowNormaliser* s_norm) const {
    const GemmNorm& norm = p.norm;
    const float count = static_cast<float>(p.k);
    float first_mean[kOf] = {};
    if (norm.centred) {
      each(p, [&](int i, float x) { first_mean[i] += x; });
#pragma unroll
      for (float& mean : first_mean) mean = warp_sum(mean) / count;
    }
    float2 sums[kOf] = {};
    each(p, [&](int i, float x) {
      const float d = x - first_mean[i];
      sums[i].x += d;
      sums[i].y += d * d;
    });
#pragma unroll
    for (int i = 0; i < kOf; ++i) {
      const RowNormaliser s =
          finish_statistics(p.k, norm.eps, norm.centred, first_mean[i], warp_sum(sums[i]));
      if (threadIdx.x % kWarp != 0) continue;
      s_norm[row(i)] = s;
      if (blockIdx.x == 0 && row(i) < p.m) {
        if (norm.mean != nullptr) norm.mean[row(i)] = s.mean();
        if (norm.rstd != nullptr) norm.rstd[row(i)] = s.rstd;
      }
    }
  }

 private:
  static __device__ __forceinline__ int row(int i) {
    return int(threadIdx.x) / kWarp + i * Config::kWarps;
  }
  static __device__ __forceinline__ int column(int j) {
    return (j * kWarp + int(threadIdx.x) % kWarp) * kChunk;
  }
  // Calls add(i, value) for every value that this lane holds; i is the row of the value.
  template <typename Add>
  __device__ __forceinline__ void each(const GemmParams& p, const Add& add) const {
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      if (column(j) >= p.k) break;
#pragma unroll
      for (int i = 0; i < kOf; ++i) {
#pragma unroll
        for (const T& x : x_[i][j].values) add(i, to_float(x));
      }
    }
  }

  Vec<T, kChunk> x_[kOf][kChunks];
};

// Reads fragments of a from shared memory and normalises them. A fragment has 16 rows and 16
// elements along K, in the layout of mma's A operand.
template <typename Config>
class RowsFragments {
  using T = typename Config::T;

 public:
  __device__ __forceinline__ RowsFragments(const GemmParams& p, const RowNormaliser* s_norm,
                                           int lane)
      : norm_(p.norm), lane_(lane) {
    if (norm_.given) {
      of_[0] = s_norm[lane / 4];
      of_[1] = s_norm[lane / 4 + 8];
    }
  }

  // `left` is the number of elements from the start of the k-block to the end of K. Elements past
  // the end of K are not normalised, so they stay 0.
  __device__ __forceinline__ void read(uint32_t (&r)[4], const typename Config::Stage& s, int slice,
                                       int left) const {
    const int row = lane_ % 16;
    load_matrix_4(r, shared_address(s.a) + rows_chunk<8>(row, slice * 2 + lane_ / 16) * 16);
    if (!norm_.given) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // each iteration handles 8 of the 16 elements along K
      if (slice * 16 + half * 8 >= left) continue;
      const uint32_t at = (slice * 16 + half * 8 + lane_ % 4 * 2) * uint32_t(sizeof(T));
      float2 scale = make_float2(1.f, 1.f), shift = make_float2(0.f, 0.f);
      if (norm_.scale != nullptr) scale = unpack_pair<T>(load_word(shared_address(s.scale) + at));
      if (norm_.shift != nullptr) shift = unpack_pair<T>(load_word(shared_address(s.shift) + at));
#pragma unroll
      for (int i = 0; i < 2; ++i) {  // i selects row lane / 4 or row lane / 4 + 8
        const float2 x = unpack_pair<T>(r[half * 2 + i]);
        r[half * 2 + i] =
            pack_pair<T>(fmaf(of_[i].normalise(x.x), scale.x + norm_.scale_offset, shift.x),
                         fmaf(of_[i].normalise(x.y), scale.y + norm_.scale_offset, shift.y));
      }
    }
  }

 private:
  const GemmNorm& norm_;
  int lane_;
  RowNormaliser of_[2] = {};
};

template <typename Config>
__global__ __launch_bounds__(RowsTile::kThreads, Config::kT.blocks_per_sm) void rows_gemm_kernel(
    const __grid_constant__ GemmParams p) {
  using T = typename Config::T;
  constexpr int kStages = Config::kStages, kColumns = Config::kColumns, kOwn = Config::kOwn;
  extern __shared__ __align__(1024) char s_bytes[];
  auto& s = *reinterpret_cast<typename Config::Shared*>(s_bytes);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int64_t column = int64_t{blockIdx.x} * kOwn;
  const int k_blocks = int((p.k + Config::kBlockK - 1) / Config::kBlockK);
  auto& ring = s.rings[warp];
  const RowsLoader<Config> loader(p, column, lane);
  griddep_wait();
  RowsStatistics<Config> statistics;
  if (p.norm.given) statistics.load(p);
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) loader.load(warp + i * Config::kWarps, ring[i]);
  if (p.norm.given) {
    statistics.share(p, s.norm);
    __syncthreads();
  }

  const RowsFragments<Config> fragments(p, s.norm, lane);
  float acc[kColumns / 8][4] = {};
  int stage = 0;
#pragma unroll 1
  for (int k_block = warp; k_block < k_blocks; k_block += Config::kWarps) {
    copy_async_wait<kStages - 2>();
    __syncwarp();
    loader.load(k_block + (kStages - 1) * Config::kWarps,
                ring[stage == 0 ? kStages - 1 : stage - 1]);
    const auto& in = ring[stage];
    const uint32_t s_b = shared_address(in.b);
    const int q = lane / 8;
#pragma unroll
    for (int slice = 0; slice < Config::kBlockK / 16; ++slice) {
      uint32_t a[4];
      fragments.read(a, in, slice, int(p.k) - k_block * Config::kBlockK);
#pragma unroll
      for (int n = 0; n < kColumns / 16; ++n) {
        uint32_t b[4];
        if constexpr (Config::kBKMajor) {
          const int row = n * 16 + q / 2 * 8 + lane % 8;
          load_matrix_4(b, s_b + rows_chunk<8>(row, slice * 2 + q % 2) * 16);
        } else {
          const int row = slice * 16 + q % 2 * 8 + lane % 8;
          load_matrix_4_transposed(
              b, s_b + rows_chunk<kColumns / Config::kChunk>(row, n * 2 + q / 2) * 16);
        }
        mma_16816<T>(acc[2 * n], a, b[0], b[1]);
        mma_16816<T>(acc[2 * n + 1], a, b[2], b[3]);
      }
    }
    if (++stage == kStages) stage = 0;
  }
  copy_async_wait<0>();
  __syncthreads();  // all warps have read their rings; the sums reuse that memory
  griddep_launch_dependents();
#pragma unroll
  for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      *reinterpret_cast<float2*>(&s.sums[warp][lane / 4 + half * 8][n * 8 + lane % 4 * 2]) =
          make_float2(acc[n][2 * half], acc[n][2 * half + 1]);
    }
  }
  __syncthreads();
  constexpr int kGroups = kOwn / kGroup;
  const int row = int(threadIdx.x) / kGroups, first = int(threadIdx.x) % kGroups * kGroup;
  if (row >= p.m || column + first >= p.n) return;
  float v[Config::kHalves][kGroup] = {};
#pragma unroll
  for (int w = 0; w < Config::kWarps; ++w) {
#pragma unroll
    for (int half = 0; half < Config::kHalves; ++half) {
      add_sums(v[half], &s.sums[w][row][half * kOwn + first]);
    }
  }
  GroupWriter<T>(p, 0, column + first).write(row, 1, 1, v);
}

template <typename T, int kTile, bool kBKMajor, bool kGated>
void launch_rows_kernel(const GemmParams& p, cudaStream_t stream) {
  using Config = RowsConfig<T, kTile, kBKMajor, kGated>;
  using Shared = typename Config::Shared;
  static_assert(Config::kRows * Config::kOwn / kGroup <= RowsTile::kThreads);
  static_assert(sizeof(Shared) <= Config::kT.shared_bytes());
  Grid grid((p.n + Config::kOwn - 1) / Config::kOwn, RowsTile::kThreads, int(sizeof(Shared)));
  grid.overlaps = device_facts().clusters;
  launch_kernel(rows_gemm_kernel<Config>, grid, stream, p);
}

template <GemmMath kMath>
void launch_rows_tiles(const GemmParams& p, cudaStream_t stream) {
  using T = ElementOf<kMath>;
  dispatch_index<kRowsTileCount>(p.choice.tile, [&](auto index) {
    constexpr int kTile = index.value;
    const bool k_major = p.b.k_stride == 1, gated = p.epilogue.gated;
    if constexpr (kRowsTiles[kTile].chain) {
      return gated ? launch_chain_kernel<T, kTile, true>(p, stream)
                   : launch_chain_kernel<T, kTile, false>(p, stream);
    } else {
      if (k_major && gated) return launch_rows_kernel<T, kTile, true, true>(p, stream);
      if (k_major) return launch_rows_kernel<T, kTile, true, false>(p, stream);
      if (gated) return launch_rows_kernel<T, kTile, false, true>(p, stream);
      launch_rows_kernel<T, kTile, false, false>(p, stream);
    }
  });
}

}  // namespace torchweld
