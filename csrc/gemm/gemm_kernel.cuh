// y = epilogue(a @ b^T) on the tensor cores of sm_80 and newer.
//
// A block owns one tile of y (and one split of K). Its threads keep a ring of `stages` operand
// tiles filled by cp.async, one step of K each; every warp multiplies its part of the tile with
// mma.sync. The finished sums go through shared memory, so that each thread ends with 8 adjacent
// columns of a row and stores 16 bytes. Blocks walk the tiles in bands of kBandRows rows, so that
// the blocks in flight cover a square of y and share operands in L2.
#pragma once

#include <type_traits>

#include "gemm/gemm_epilogue.cuh"
#include "gemm/gemm_launch.h"
#include "gemm/gemm_loader.cuh"

namespace torchweld {

// What memory holds of the operands.
template <GemmMath kMath>
using ElementOf =
    std::conditional_t<kMath == GemmMath::kFloat16, __half,
                       std::conditional_t<kMath == GemmMath::kBFloat16, __nv_bfloat16, float>>;

constexpr int kBandRows = 2048;

// Counts slices and parts where the compiler must know them.
template <int kIndex>
using Part = std::integral_constant<int, kIndex>;

// Which tile, batch and split a block has.
struct BlockWork {
  int64_t tile_m, tile_n, batch;
  int split;

  __device__ __forceinline__ BlockWork(const GemmParams& p, int64_t tiles_m, int64_t tiles_n,
                                       int band_tiles) {
    const int64_t block = blockIdx.x;
    const int64_t tiles = tiles_m * tiles_n;
    const int64_t outer = block / tiles, tile = block % tiles;
    split = int(outer % p.choice.splits);
    batch = outer / p.choice.splits;
    const int64_t band = tile / (band_tiles * tiles_n), in_band = tile % (band_tiles * tiles_n);
    const int64_t height = min(int64_t{band_tiles}, tiles_m - band * band_tiles);
    tile_m = band * band_tiles + in_band % height;
    tile_n = in_band / height;
  }
};

// A slice of a warp's operands: (kM * 16, slice) of a and (kN * 8, slice) of b.
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

// acc += a @ b^T for two slices of fp32, as one of 16-bit pieces: the depths t and t + 4 of a slice
// become 2t and 2t + 1, for any order of K serves that is the same for a and b. kCareful admits
// inf, NaN and what rounds to inf; without it `check` becomes NaN at them. read(r, operand, i,
// second) reads 16 rows of the first or second slice.
template <bool kCareful, int kM, int kN, class Read>
__device__ __forceinline__ void multiply_split(float (&acc)[kM][kN][4], const Read& read,
                                               float& check) {
  SplitFragment<4, kCareful> a[kM];
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
  uint32_t raw[2][4];  // of two n8 tiles
#pragma unroll
  for (int j = 0; j < kN; ++j) {
    const int at = j % 2 * 2;
    if (at == 0) {
      read(raw[0], OperandB{}, j / 2, 0);
      read(raw[1], OperandB{}, j / 2, 1);
    }
    SplitFragment<2, kCareful> b;
    b.set(0, raw[0][at], raw[0][at + 1], check);
    b.set(1, raw[1][at], raw[1][at + 1], check);
#pragma unroll
    for (int i = 0; i < kM; ++i) mma_split(acc[i][j], a[i], b);
  }
}

// acc += a @ b^T for one slice of 16-bit values or TF32.
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

// A warp's sums, staged in shared memory, to y or to the workspace of a split product.
// NOTE: not inlined, so that its registers do not disturb the schedule of the main loop: that costs
// up to 10 %.
template <GemmMath kMath, int kTile>
__device__ __noinline__ void finish(const GemmParams& p, const BlockWork& work, const float* s_sums,
                                    int warp_m, int warp_n, int lane) {
  using T = ElementOf<kMath>;
  constexpr GemmTile kT = kGemmTiles[kTile];
  constexpr int kStride = kT.warp_n() + 8;
  const bool gated = p.epilogue.gated, split = p.choice.splits > 1;
  const int64_t first_row = work.tile_m * kT.block_m + warp_m * kT.warp_m();
  // Columns of the staged sums that a group takes: 8, or 8 left and 8 right ones.
  const int width = gated ? 16 : 8;
  const int groups = kT.warp_n() / width;
  const int group = lane % groups, rows_at_once = 32 / groups;
  const int64_t column =
      (work.tile_n * kT.block_n + warp_n * kT.warp_n()) / (gated ? 2 : 1) + group * kGroup;
  if (column >= p.n) return;
  const int rows = int(min(int64_t{kT.warp_m()}, p.m - first_row));
  const auto for_each_row = [&](const auto& body) {
    const float* s_row = s_sums + (lane / groups) * kStride + group * width;
    for (int r = lane / groups; r < rows; r += rows_at_once, s_row += rows_at_once * kStride) {
      float v[kGroup], right[kGroup];
#pragma unroll
      for (int i = 0; i < kGroup; ++i) v[i] = s_row[i];
      if (gated) {
#pragma unroll
        for (int i = 0; i < kGroup; ++i) right[i] = s_row[kGroup + i];
      }
      body(v, right);
    }
  };
  const int64_t row = first_row + lane / groups;
  if (split) {
    const int64_t sum_width = gemm_sum_width(p.n, gated);
    float* g_sums =
        p.workspace + ((work.split * p.batch + work.batch) * p.m + row) * sum_width + column;
    for_each_row([&](const float (&v)[kGroup], const float (&right)[kGroup]) {
      store_sums(g_sums, v);
      if (gated) store_sums(g_sums + sum_width / 2, right);
      g_sums += rows_at_once * sum_width;
    });
  } else {
    RowWriter<T> writer(p, work.batch, row, column, rows_at_once);
    for_each_row([&](float (&v)[kGroup], float (&right)[kGroup]) { writer.write(v, right); });
  }
}

// acc = a @ b^T for a warp's part of the block's tile and split. Returns NaN where it must be done
// again with kCareful.
template <GemmMath kMath, int kTile, bool kAKMajor, bool kBKMajor, bool kCareful, int kM, int kN>
__device__ __forceinline__ float main_loop(float (&acc)[kM][kN][4], const GemmParams& p,
                                           const BlockWork& work, char* s_ring) {
  using T = ElementOf<kMath>;
  constexpr GemmTile kT = kGemmTiles[kTile];
  constexpr int kStages = kT.stages, kBytesA = kT.block_m * kGemmStepBytes;
  constexpr int kStepElems = kGemmStepBytes / int(sizeof(T));
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int warp_m = warp % kT.warps_m, warp_n = warp / kT.warps_m;
  const int64_t k_begin = work.split * p.choice.k_split;
  const int64_t k_end = min(p.k, k_begin + p.choice.k_split);
  const int steps = int((k_end - k_begin + kStepElems - 1) / kStepElems);

  const auto source = [&](const GemmOperand& operand, int64_t first, int64_t rows, bool gated) {
    const int64_t elem = sizeof(T);
    const bool pairs = gated && p.epilogue.interleaved;
    return TileSource{
        static_cast<const char*>(operand.data) + work.batch * operand.batch_stride * elem,
        operand.row_stride * elem * (pairs ? 2 : 1),
        operand.k_stride * elem,
        operand.row_stride * elem * (pairs ? 1 : rows),
        first,
        rows,
        {gated}};
  };
  const bool gated = p.epilogue.gated;
  TileLoader<T, kT.block_m, kT.threads(), kAKMajor> loader_a(
      source(p.a, work.tile_m * kT.block_m, p.m, false), k_begin, k_end, thread);
  TileLoader<T, kT.block_n, kT.threads(), kBKMajor> loader_b(
      source(p.b, work.tile_n * (gated ? kT.block_n / 2 : kT.block_n), p.n, gated), k_begin, k_end,
      thread);
  const uint32_t s_base = shared_address(s_ring);
  const auto load = [&](int stage, auto... parts) {
    const uint32_t s_stage = s_base + stage * kT.stage_bytes();
    (loader_a.template load<parts.value>(s_stage), ...);
    (loader_b.template load<parts.value>(s_stage + kBytesA), ...);
  };

  const auto reader_a =
      FragmentReader<T, kT.block_m, kAKMajor>::template make<true>(lane, warp_m * kT.warp_m());
  const auto reader_b =
      FragmentReader<T, kT.block_n, kBKMajor>::template make<false>(lane, warp_n * kT.warp_n());
  // A slice is read while the one before is multiplied, except where registers are short.
  constexpr bool kAhead = kMath != GemmMath::kFloat32;
  Slice<kM, kN> slices[2];
  const auto read = [&](int to, int stage, int slice) {
    const uint32_t s_stage = s_base + stage * kT.stage_bytes();
    slices[to].load(reader_a, reader_b, s_stage, s_stage + kBytesA, slice);
  };

#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    if (stage < steps) load(stage, Part<0>{}, Part<1>{}, Part<2>{}, Part<3>{});
    copy_async_commit();
  }
  copy_async_wait<kStages - 2>();
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kM; ++i) {
#pragma unroll
    for (int j = 0; j < kN; ++j) {
#pragma unroll
      for (int r = 0; r < 4; ++r) acc[i][j][r] = 0.f;
    }
  }
  if constexpr (kAhead) read(0, 0, 0);
  // The next step is there, and every warp has read this one.
  const auto advance = [] {
    copy_async_commit();
    copy_async_wait<kStages - 2>();
    __syncthreads();
  };
  float check = 0.f;
  int stage = 0, free_stage = kStages - 1;
  for (int step = 0; step < steps; ++step) {
    const bool more = step + kStages - 1 < steps;
    const int next = stage + 1 == kStages ? 0 : stage + 1;
    if constexpr (kAhead) {
      const auto turn = [&](auto slice, auto... parts) {
        constexpr int kNext = (slice.value + 1) % 4;
        read(kNext % 2, kNext == 0 ? next : stage, kNext);
        if (more) load(free_stage, parts...);
        multiply<kMath>(acc, slices[slice.value % 2]);
      };
      turn(Part<0>{}, Part<0>{}, Part<1>{});
      turn(Part<1>{}, Part<2>{});
      turn(Part<2>{}, Part<3>{});
      advance();
      turn(Part<3>{});
    } else {
      if (more) load(free_stage, Part<0>{}, Part<1>{}, Part<2>{}, Part<3>{});
#pragma unroll 1
      for (int slice = 0; slice < 4; slice += 2) {
        const uint32_t s_stage = s_base + stage * kT.stage_bytes();
        const auto read_one = [&](uint32_t (&r)[4], auto operand, int i, int second) {
          if constexpr (operand.is_a) {
            reader_a.template load<true>(r, s_stage, i, slice + second);
          } else {
            reader_b.template load<false>(r, s_stage + kBytesA, i, slice + second);
          }
        };
        multiply_split<kCareful>(acc, read_one, check);
        __syncwarp();  // NOTE: without it the compiler mixes two turns and spills
      }
      advance();
    }
    free_stage = stage;
    stage = next;
  }
  copy_async_wait<0>();
  __syncthreads();  // the ring's memory is free
  return check;
}

template <GemmMath kMath, int kTile, bool kAKMajor, bool kBKMajor>
__global__ void __launch_bounds__(kGemmTiles[kTile].threads(), kGemmTiles[kTile].blocks_per_sm)
    gemm_kernel(const __grid_constant__ GemmParams p, int64_t tiles_m, int64_t tiles_n) {
  constexpr GemmTile kT = kGemmTiles[kTile];
  constexpr int kM = kT.warp_m() / 16, kN = kT.warp_n() / 8;
  extern __shared__ __align__(128) char s_ring[];
  const BlockWork work(p, tiles_m, tiles_n, kBandRows / kT.block_m);

  float acc[kM][kN][4];
  const float check = main_loop<kMath, kTile, kAKMajor, kBKMajor, false>(acc, p, work, s_ring);
  if constexpr (kMath == GemmMath::kFloat32) {
    if (__syncthreads_or(isnan(check))) {
      main_loop<kMath, kTile, kAKMajor, kBKMajor, true>(acc, p, work, s_ring);
    }
  }

  constexpr int kStride = kT.warp_n() + 8;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  float* s_sums = reinterpret_cast<float*>(s_ring) + warp * kT.warp_m() * kStride;
#pragma unroll
  for (int i = 0; i < kM; ++i) {
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      float* s_to = s_sums + (i * 16 + g) * kStride + j * 8 + t * 2;
      *reinterpret_cast<float2*>(s_to) = make_float2(acc[i][j][0], acc[i][j][1]);
      *reinterpret_cast<float2*>(s_to + 8 * kStride) = make_float2(acc[i][j][2], acc[i][j][3]);
    }
  }
  __syncwarp();
  finish<kMath, kTile>(p, work, s_sums, warp % kT.warps_m, warp / kT.warps_m, lane);
}

template <GemmMath kMath, int kTile, bool kAKMajor, bool kBKMajor>
void launch_gemm_kernel(const GemmParams& p, cudaStream_t stream) {
  constexpr GemmTile kT = kGemmTiles[kTile];
  const auto kernel = gemm_kernel<kMath, kTile, kAKMajor, kBKMajor>;
  allow_shared_memory(kernel, kT.shared_bytes());
  const int64_t width = p.epilogue.gated ? 2 * p.n : p.n;
  const int64_t tiles_m = (p.m + kT.block_m - 1) / kT.block_m;
  // NOTE: a gated tile's halves both end at n, so that tiles are counted in columns of y.
  const int64_t tiles_n = (width + kT.block_n - 1) / kT.block_n;
  const int64_t blocks = tiles_m * tiles_n * p.batch * p.choice.splits;
  kernel<<<unsigned(blocks), kT.threads(), kT.shared_bytes(), stream>>>(p, tiles_m, tiles_n);
}

// The four layouts of one tile.
template <GemmMath kMath, int kTile>
void launch_gemm_tile(const GemmParams& p, cudaStream_t stream) {
  const bool a_k_major = p.a.k_stride == 1, b_k_major = p.b.k_stride == 1;
  if (a_k_major && b_k_major) return launch_gemm_kernel<kMath, kTile, true, true>(p, stream);
  if (a_k_major) return launch_gemm_kernel<kMath, kTile, true, false>(p, stream);
  if (b_k_major) return launch_gemm_kernel<kMath, kTile, false, true>(p, stream);
  launch_gemm_kernel<kMath, kTile, false, false>(p, stream);
}

template <GemmMath kMath, int kTile = 0>
void launch_gemm_tiles(const GemmParams& p, cudaStream_t stream) {
  if constexpr (kTile < kGemmTileCount) {
    if constexpr (kGemmTiles[kTile].suits(kMath)) {
      if (p.choice.tile == kTile) return launch_gemm_tile<kMath, kTile>(p, stream);
    }
    launch_gemm_tiles<kMath, kTile + 1>(p, stream);
  }
}

template <GemmMath kMath>
void launch_gemm_math(const GemmParams& p, cudaStream_t stream) {
  launch_gemm_tiles<kMath>(p, stream);
}

}  // namespace torchweld
