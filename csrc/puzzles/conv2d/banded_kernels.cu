// Convolution in 16 bits on tensor cores, for convolution kernels that are too large for
// puzzles/conv2d/cells.cuh.
//
// Row p of the weights becomes a band matrix. For a tile whose first column is j0:
//   z[i, j] += sum_k x[i + p, j0 + k] * band_p[k, j - j0]
//   band_p[k, n] = weight[p, k - n] if k - n is a column of the convolution kernel, else 0
// A tile has 16 rows and 8 columns. If the convolution kernel has up to 9 columns, the tile needs
// kernel_height mma m16n8k16 instructions. If the convolution kernel is wider, the tile needs two
// or three times as many instructions. Products are exact, and accumulators are fp32.
//
// A block copies its rows of x to shared memory, with their halo and with zeros outside the image.
// Images are stacked (StackedRows), so that a block can process many small images. Each warp
// computes its own tiles.
// NaN. Therefore an output that is not finite is recomputed from its own window.
#include "device/dispatch.cuh"
#include "device/mma_sync.cuh"
#include "device/reduce.cuh"
#include "puzzles/conv2d/tiles.cuh"

namespace torchweld {
namespace {

constexpr int kBandedThreads = kBandedWarps * kWarp;
// The number of elements in a 16-byte vector, which is also the number of columns of a tile.
constexpr int kVector = 8;
constexpr int kTileRows = 16;
constexpr int kBlockK = 16;  // number of columns of x that one mma multiplies

template <typename T_, int kTile>
struct BandedConfig {
  using T = T_;
  static constexpr BandedTile kShape = kBandedTiles[kTile];
  static constexpr int kTilesM = kShape.tiles_m;
  static constexpr int kTilesN = kShape.tiles_n;
  static constexpr int kRows = kShape.rows(kBandedWarps);
  static constexpr int kOutPitch =
      kVector * (kTilesN | 1);  // the number of 16-byte units is odd, which avoids bank conflicts
  static_assert(sizeof(T) == 2 && kTilesN * kVector == kShape.columns());
};

// The sizes of the arrays in a block's shared memory. They depend on the size of the convolution
// kernel.
template <typename Config>
struct BandedLayout {
  int steps;       // number of mma instructions along K per row of weights
  int before;      // number of vectors of a staged row before the block's output columns
  int halo;        // number of vectors of a staged row before and after the output columns
  int pitch;       // number of elements from one staged row to the next
  int rows;        // the number of staged rows
  int band_words;  // number of 32-bit words in all band matrices

  TW_HOST_DEVICE BandedLayout(int kernel_height, int kernel_width, bool flipped) {
    steps = (kernel_width - 1 + kVector + kBlockK - 1) / kBlockK;
    before = flipped ? (kernel_width - 1 + kVector - 1) / kVector : 0;
    halo = 2 * steps - 1;
    pitch = kVector * ((Config::kTilesN + halo) | 1);
    rows = Config::kRows + kernel_height - 1;
    band_words = 2 * kWarp * kernel_height * steps;
  }
  TW_HOST_DEVICE int bytes() const {
    return 16 * rows + 4 * band_words +
           2 * (rows * pitch + kBandedWarps * kTileRows * Config::kOutPitch);
  }
};

// The offset of a stacked row in x, and its offset in z. An offset of -1 stands for a row of zeros.
struct RowOffsets {
  int64_t in_x, in_z;
};

// The arrays in a block's shared memory.
// NOTE: ldmatrix may read one vector behind the last row of s_x. This vector lies in s_z, and its
// values are not used.
template <typename Config>
struct BandedShared {
  using T = typename Config::T;
  T* s_x;              // (rows, pitch)
  T* s_z;              // (warps, 16, kOutPitch)
  uint32_t* s_band;    // (kernel_height, steps, 32, 2)
  RowOffsets* s_rows;  // (rows,)

  __device__ __forceinline__ BandedShared(char* s_base, const BandedLayout<Config>& layout) {
    s_x = reinterpret_cast<T*>(s_base);
    s_z = s_x + layout.rows * layout.pitch;
    s_band = reinterpret_cast<uint32_t*>(s_z + kBandedWarps * kTileRows * Config::kOutPitch);
    s_rows = reinterpret_cast<RowOffsets*>(s_band + layout.band_words);
  }
};

// Writes the band matrices to shared memory. In every matrix, each lane of a warp has two words.
template <typename T>
__device__ __forceinline__ void make_bands(uint32_t* s_band, const Conv2dArgs<T>& args, int steps,
                                           int shift) {
  const int kernel_width = static_cast<int>(args.kernel_width);
  const int words = 2 * kWarp * steps * static_cast<int>(args.kernel_height);
  for (int i = threadIdx.x; i < words; i += kBandedThreads) {
    const int half = i % 2, lane = i / 2 % kWarp, product = i / (2 * kWarp);
    const int p = product / steps;
    const int k = product % steps * kBlockK + half * kVector + lane % 4 * 2;
    const int q = k - lane / 4 - shift;
    const auto weight = [&](int tap) {
      return tap >= 0 && tap < kernel_width ? weight_at(args, p, tap) : 0.f;
    };
    s_band[i] = pack_pair<T>(weight(q), weight(q + 1));
  }
}

// Copies eight columns of a row of x to shared memory. Columns outside the image become zeros.
template <typename T>
__device__ __forceinline__ void stage_vector(T* s_to, const Conv2dArgs<T>& args, int64_t row_offset,
                                             int64_t column) {
  if (args.aligned) {
    const bool valid = row_offset >= 0 && column >= 0 && column < args.width;
    copy_async_16_if(shared_address(s_to), args.g_x + (valid ? row_offset + column : 0), valid);
    return;
  }
  Vec<T, kVector> in;
#pragma unroll
  for (int c = 0; c < kVector; ++c) {
    const bool valid = row_offset >= 0 && column + c >= 0 && column + c < args.width;
    in.values[c] = valid ? args.g_x[row_offset + column + c] : from_float<T>(0.f);
  }
  store_vec(s_to, in);
}

// Copies the block's rows of x to shared memory: first the columns of the outputs, then the halo.
template <typename Config>
__device__ __forceinline__ void stage_rows(const BandedShared<Config>& shared,
                                           const BandedLayout<Config>& layout,
                                           const Conv2dArgs<typename Config::T>& args,
                                           int64_t first_column) {
  constexpr int kTilesN = Config::kTilesN;
  const auto stage = [&](int row, int vector) {
    stage_vector(shared.s_x + row * layout.pitch + vector * kVector, args, shared.s_rows[row].in_x,
                 first_column + (vector - layout.before) * kVector);
  };
  for (int i = threadIdx.x; i < layout.rows * kTilesN; i += kBandedThreads) {
    stage(i / kTilesN, layout.before + i % kTilesN);
  }
  for (int i = threadIdx.x; i < layout.rows * layout.halo; i += kBandedThreads) {
    const int vector = i % layout.halo;
    stage(i / layout.halo, vector < layout.before ? vector : vector + kTilesN);
  }
  copy_async_commit();
  copy_async_wait<0>();
}

// Recomputes the outputs of a tile that are not finite, each from its own window.
template <typename Config>
__device__ __forceinline__ void recompute_tile(const BandedShared<Config>& shared, int pitch,
                                               const Conv2dArgs<typename Config::T>& args, int row,
                                               int shift, typename Config::T* s_z) {
  constexpr int kColumns = Config::kTilesN * kVector;
  for (int i = threadIdx.x % kWarp; i < kTileRows * kColumns; i += kWarp) {
    typename Config::T& z = s_z[i / kColumns * Config::kOutPitch + i % kColumns];
    if (isfinite(to_float(z))) continue;
    const typename Config::T* s_window =
        shared.s_x + (row + i / kColumns) * pitch + i % kColumns + shift;
    float sum = 0.f;
    for (int p = 0; p < args.kernel_height; ++p) {
      for (int q = 0; q < args.kernel_width; ++q) {
        sum = fmaf(weight_at(args, p, q), to_float(s_window[p * pitch + q]), sum);
      }
    }
    z = from_float<typename Config::T>(sum);
  }
}

// Computes a tile of the warp and writes it to shared memory. The first of the tile's 16 rows is
// `row`.
template <typename Config>
__device__ __forceinline__ void compute_tile(const BandedShared<Config>& shared,
                                             const BandedLayout<Config>& layout,
                                             const Conv2dArgs<typename Config::T>& args, int row,
                                             int shift, typename Config::T* s_z) {
  using T = typename Config::T;
  constexpr int kTilesN = Config::kTilesN;
  constexpr int kPairs = (kTilesN + 2) / 2;  // number of pairs of 16-byte vectors of a row of x
  const int lane = threadIdx.x % kWarp;
  float r_acc[kTilesN][4] = {};
  const uint32_t s_from =
      shared_address(shared.s_x + (row + lane % 16) * layout.pitch + lane / 16 * kVector);
  const uint2* s_band = reinterpret_cast<const uint2*>(shared.s_band) + lane;
  for (int p = 0; p < static_cast<int>(args.kernel_height); ++p) {
    for (int step = 0; step < layout.steps; ++step) {
      const uint2 band = *s_band;
      s_band += kWarp;
      uint32_t r_x[kPairs][4];
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        load_matrix_4(r_x[i], s_from + 2 * (p * layout.pitch + step * kBlockK + i * 2 * kVector));
      }
#pragma unroll
      for (int n = 0; n < kTilesN; ++n) {
        const uint32_t (&left)[4] = r_x[n / 2];
        const uint32_t (&right)[4] = r_x[(n + 1) / 2];
        const uint32_t r_a[4] = {left[n % 2 * 2], left[n % 2 * 2 + 1], right[(n + 1) % 2 * 2],
                                 right[(n + 1) % 2 * 2 + 1]};
        mma_16816<T>(r_acc[n], r_a, band.x, band.y);
      }
    }
  }
  float check = 0.f;  // NaN if an output is not finite
#pragma unroll
  for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float left = r_acc[n][2 * half], right = r_acc[n][2 * half + 1];
      check = fmaf(left, 0.f, fmaf(right, 0.f, check));
      *reinterpret_cast<uint32_t*>(s_z + (half * 8 + lane / 4) * Config::kOutPitch + n * kVector +
                                   lane % 4 * 2) = pack_pair<T>(left, right);
    }
  }
  __syncwarp();
  if (__any_sync(~0u, isnan(check))) {
    recompute_tile(shared, layout.pitch, args, row, shift, s_z);
    __syncwarp();
  }
}

// Copies the tile from shared memory to z.
template <typename Config>
__device__ __forceinline__ void store_tile(const typename Config::T* s_z, const RowOffsets* s_rows,
                                           const Conv2dArgs<typename Config::T>& args,
                                           int64_t first_column) {
  constexpr int kElems = kVector;
  constexpr int kColumns = Config::kTilesN * kVector;
  const int lane = threadIdx.x % kWarp;
  if (args.aligned) {
    for (int i = lane; i < kTileRows * Config::kTilesN; i += kWarp) {
      const int row = i / Config::kTilesN, c = i % Config::kTilesN * kElems;
      if (s_rows[row].in_z < 0 || first_column + c >= args.width) continue;
      store_vec(args.g_z + s_rows[row].in_z + first_column + c,
                load_vec<typename Config::T, kElems>(s_z + row * Config::kOutPitch + c));
    }
    return;
  }
  for (int i = lane; i < kTileRows * kColumns; i += kWarp) {
    const int row = i / kColumns, c = i % kColumns;
    if (s_rows[row].in_z < 0 || first_column + c >= args.width) continue;
    args.g_z[s_rows[row].in_z + first_column + c] = s_z[row * Config::kOutPitch + c];
  }
}

template <typename Config>
__global__ __launch_bounds__(kBandedThreads, 6) void conv2d_banded_kernel(
    const Conv2dArgs<typename Config::T> args) {
  extern __shared__ __align__(16) char s_base[];
  const int kernel_height = static_cast<int>(args.kernel_height);
  const int kernel_width = static_cast<int>(args.kernel_width);
  const BandedLayout<Config> layout(kernel_height, kernel_width, args.flipped);
  const BandedShared<Config> shared(s_base, layout);
  const int64_t block = args.first_block + blockIdx.x;
  const int64_t row_tile = args.by_column_tiles.divide(block);
  const int64_t column_tile = block - row_tile * args.by_column_tiles.divisor();
  // The block's first output row, counted in the stack of all images.
  const int64_t first_row = row_tile * Config::kRows;
  const int64_t first_column = column_tile * Config::kShape.columns();
  // The index of a window's first element within the 16-byte vector that holds this element.
  const int shift = args.flipped ? layout.before * kVector - (kernel_width - 1) : 0;

  const StackedRows<typename Config::T> stack{args};
  const int rows_before =
      // The number of staged rows above the rows of the outputs.
      args.flipped ? kernel_height - 1 : 0;
  for (int i = threadIdx.x; i < layout.rows; i += kBandedThreads) {
    const int64_t row = first_row - rows_before + i;
    shared.s_rows[i] = {stack.offset_in_x(row), stack.offset_in_z(row)};
  }
  make_bands(shared.s_band, args, layout.steps, shift);
  __syncthreads();
  stage_rows(shared, layout, args, first_column);
  __syncthreads();

  const int warp = threadIdx.x / kWarp;
  typename Config::T* s_z = shared.s_z + warp * kTileRows * Config::kOutPitch;
#pragma unroll 1
  for (int m = 0; m < Config::kTilesM; ++m) {
    const int row = (warp * Config::kTilesM + m) * kTileRows;
    compute_tile(shared, layout, args, row, shift, s_z);
    store_tile<Config>(s_z, shared.s_rows + rows_before + row, args, first_column);
    __syncwarp();
  }
}

template <typename T, int kTile>
void launch_tile(const Conv2dParams& params, cudaStream_t stream) {
  using Config = BandedConfig<T, kTile>;
  constexpr int64_t kColumns = Config::kShape.columns();
  const int64_t column_tiles = (params.width + kColumns - 1) / kColumns;
  const int64_t per_image = params.height + params.kernel_height - 1;
  const int64_t row_tiles = (params.batch * per_image + Config::kRows - 1) / Config::kRows;
  const BandedLayout<Config> layout(static_cast<int>(params.kernel_height),
                                    static_cast<int>(params.kernel_width), params.flipped);
  for_each_grid(conv2d_args<T>(params, column_tiles, per_image), column_tiles * row_tiles,
                [&](const Conv2dArgs<T>& args, int64_t blocks) {
                  launch_kernel(conv2d_banded_kernel<Config>,
                                {blocks, kBandedThreads, layout.bytes()}, stream, args);
                });
}

}  // namespace

void launch_conv2d_banded(int tile, const Conv2dParams& params, cudaStream_t stream) {
  dispatch_index<kNumBandedTiles>(tile, [&](auto index) {
    if (params.dtype == DType::kFloat16) return launch_tile<__half, index.value>(params, stream);
    launch_tile<__nv_bfloat16, index.value>(params, stream);
  });
}

}  // namespace torchweld
