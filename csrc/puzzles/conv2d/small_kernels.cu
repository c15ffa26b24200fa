// Convolution in fp32 with small square kernels, for contiguous images of 8 columns. The kernel of
// direct_kernels.cu computes the other images.
//
// A warp copies consecutive images to shared memory. There, 16 bytes of padding follow each image,
// to avoid bank conflicts. A thread computes an image, 8 rows of outputs at a time. The window of
// these outputs is the part of x that they depend on. The thread reads each row of the window once
// and adds its products to all outputs that depend on it. The weights are in registers. Results
// overwrite rows of x that are no longer needed. At the end the warp stores all images. The copies
// of other warps overlap with the math. The zeros outside an image are neither read nor multiplied.
// NOTE: a weight of inf or NaN times such a zero would be NaN. Therefore, if a weight is inf or
// NaN, the kernel later corrects the outputs near the bottom and the right edge.
#include "device/dispatch.cuh"
#include "device/mma_sync.cuh"
#include "device/reduce.cuh"
#include "puzzles/conv2d/tiles.cuh"

namespace torchweld {
namespace {

constexpr int kElems = 4;       // number of elements in a 16-byte vector
constexpr int kImages = kWarp;  // the number of images per warp

template <int kTile, bool kFlipped_>
struct SmallConfig {
  static constexpr int kSize = kDirectTiles[kTile].size;
  static constexpr int kBlocksPerSm = kDirectTiles[kTile].small_blocks_per_sm;
  static constexpr bool kFlipped = kFlipped_;
};

// The number of floats from one image in shared memory to the next.
__host__ __device__ constexpr int small_pitch(int height) {
  return height * kSmallColumns + kElems;
}

// Calls body(g_offset, s_offset) for every 16-byte vector of the warp's images. g_offset and
// s_offset are the offsets of the vector from the first image, in global memory and in shared
// memory. The function handles 4 rows of several images at a time, so that both offsets advance by
// constants and need no divisions.
template <typename Body>
__device__ __forceinline__ void for_each_access(int height, int images, const Body& body) {
  constexpr int kRows = 4;
  constexpr int kPerImage = kRows * kSmallColumns / kElems;
  constexpr int kImagesAtOnce = kWarp / kPerImage;
  const int lane = threadIdx.x % kWarp, first_image = lane / kPerImage;
  const int floats = height * kSmallColumns, pitch = small_pitch(height);
#pragma unroll 1
  for (int first = 0; first < height; first += kRows) {
    const int offset = first * kSmallColumns + lane % kPerImage * kElems;
    if (offset >= floats) continue;
    int g_offset = first_image * floats + offset, s_offset = first_image * pitch + offset;
#pragma unroll 8
    for (int i = first_image; i < images; i += kImagesAtOnce) {
      body(g_offset, s_offset);
      g_offset += kImagesAtOnce * floats;
      s_offset += kImagesAtOnce * pitch;
    }
  }
}

// An image in shared memory. Rows and columns are in the order in which the thread processes them.
template <bool kFlipped>
struct SmallImage {
  float* s_first;  // the address of the first row

  __device__ __forceinline__ float* row(int row) const {
    return s_first + (kFlipped ? -row : row) * kSmallColumns;
  }
  __device__ __forceinline__ void load(float (&r_x)[kSmallColumns], int index) const {
#pragma unroll
    for (int c = 0; c < kSmallColumns; c += kElems) {
      const Vec<float, kElems> in = load_vec<float, kElems>(row(index) + vector_column(c));
#pragma unroll
      for (int e = 0; e < kElems; ++e) r_x[c + e] = in.values[kFlipped ? kElems - 1 - e : e];
    }
  }
  __device__ __forceinline__ void store(const float (&r_z)[kSmallColumns], int index) const {
#pragma unroll
    for (int c = 0; c < kSmallColumns; c += kElems) {
      Vec<float, kElems> out;
#pragma unroll
      for (int e = 0; e < kElems; ++e) out.values[e] = r_z[c + (kFlipped ? kElems - 1 - e : e)];
      store_vec(row(index) + vector_column(c), out);
    }
  }
  static constexpr __device__ int vector_column(int c) {
    return kFlipped ? kSmallColumns - kElems - c : c;
  }
};

// Computes the thread's image. The outputs overwrite x in shared memory.
template <typename Config>
__device__ __forceinline__ void convolve_image(
    const SmallImage<Config::kFlipped>& image, int height,
    const float (&r_weight)[Config::kSize][Config::kSize]) {
  constexpr int kSize = Config::kSize;
  constexpr int kRows = kSmallRows;
#pragma unroll 1
  for (int first = 0; first < height; first += kRows) {
    float r_z[kRows][kSmallColumns] = {};
#pragma unroll
    for (int step = 0; step < kRows + kSize - 1; ++step) {
      if (first + step >= height) break;
      float r_x[kSmallColumns];
      image.load(r_x, first + step);
#pragma unroll
      for (int p = 0; p < kSize; ++p) {
        const int r = step - p;
        if (r < 0 || r >= kRows) continue;
#pragma unroll
        for (int q = 0; q < kSize; ++q) {
#pragma unroll
          for (int c = 0; c + q < kSmallColumns; ++c) {
            r_z[r][c] = fmaf(r_weight[p][q], r_x[c + q], r_z[r][c]);
          }
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (first + r < height) image.store(r_z[r], first + r);
    }
  }
}

// Adds the products of weights with zeros outside the image. convolve_image skips these products.
template <typename Config>
__device__ __forceinline__ void mark_edges(const SmallImage<Config::kFlipped>& image, int height,
                                           const float* g_weight) {
  for (int i = 0; i < height; ++i) {
    for (int c = 0; c < kSmallColumns; ++c) {
      float& z = image.row(i)[Config::kFlipped ? kSmallColumns - 1 - c : c];
      for (int p = 0; p < Config::kSize; ++p) {
        for (int q = 0; q < Config::kSize; ++q) {
          if (i + p < height && c + q < kSmallColumns) continue;
          z = fmaf(g_weight[p * Config::kSize + q], 0.f, z);
        }
      }
    }
  }
}

template <typename Config>
__global__ __launch_bounds__(kSmallThreads, Config::kBlocksPerSm) void conv2d_small_kernel(
    const Conv2dArgs<float> args) {
  extern __shared__ __align__(16) float s_base[];
  constexpr int kSize = Config::kSize;
  const int height = static_cast<int>(args.height), lane = threadIdx.x % kWarp;
  float* s_images = s_base + threadIdx.x / kWarp * kImages * small_pitch(height);
  const int64_t run = (args.first_block + blockIdx.x) * kSmallWarps + threadIdx.x / kWarp;
  const int64_t first_image = run * kImages;
  if (first_image >= args.batch) return;
  const int64_t left = args.batch - first_image;
  const int images = left < kImages ? static_cast<int>(left) : kImages;
  const float* g_x = args.g_x + first_image * height * kSmallColumns;
  float* g_z = args.g_z + first_image * height * kSmallColumns;
  const uint32_t s_to = shared_address(s_images);
  for_each_access(height, images, [&](int g_offset, int s_offset) {
    copy_async_16(s_to + 4 * s_offset, g_x + g_offset, 16);
  });
  copy_async_commit();

  float r_weight[kSize][kSize];
  float check = 0.f;  // NaN if a weight is not finite
#pragma unroll
  for (int p = 0; p < kSize; ++p) {
#pragma unroll
    for (int q = 0; q < kSize; ++q) {
      r_weight[p][q] = __ldg(args.g_weight + p * kSize + q);
      check = fmaf(r_weight[p][q], 0.f, check);
    }
  }
  copy_async_wait<0>();
  __syncwarp();

  // NOTE: the lanes have no bank conflicts, because the pitch of an image is an odd number of
  // vectors. Lanes without an image compute with undefined values, and their results are not
  // stored.
  float* s_first = s_images + lane * small_pitch(height);
  if (Config::kFlipped) s_first += (height - 1) * kSmallColumns;
  const SmallImage<Config::kFlipped> image = {s_first};
  convolve_image<Config>(image, height, r_weight);
  if (isnan(check)) mark_edges<Config>(image, height, args.g_weight);
  __syncwarp();
  for_each_access(height, images, [&](int g_offset, int s_offset) {
    store_vec(g_z + g_offset, load_vec<float, kElems>(s_images + s_offset));
  });
}

template <typename Config>
void launch_config(const Conv2dParams& params, cudaStream_t stream) {
  const int bytes = 4 * kSmallWarps * kImages * small_pitch(static_cast<int>(params.height));
  const int64_t images = kSmallWarps * kImages;  // the number of images per block
  for_each_grid(conv2d_args<float>(params, 1, 1), (params.batch + images - 1) / images,
                [&](const Conv2dArgs<float>& args, int64_t blocks) {
                  launch_kernel(conv2d_small_kernel<Config>, {blocks, kSmallThreads, bytes}, stream,
                                args);
                });
}

}  // namespace

void launch_conv2d_small(const Conv2dParams& params, cudaStream_t stream) {
  dispatch_index<kNumDirectTiles>(direct_tile(params.kernel_height), [&](auto tile) {
    if (params.flipped) return launch_config<SmallConfig<tile.value, true>>(params, stream);
    launch_config<SmallConfig<tile.value, false>>(params, stream);
  });
}

}  // namespace torchweld
