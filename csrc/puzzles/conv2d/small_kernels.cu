// Convolution in fp32 with small square kernels, for images up to 8 or 16 columns wide.
//
// A warp copies consecutive images to shared memory. There, 16 bytes of padding follow each image,
// to avoid bank conflicts. A thread computes 8 columns of an image, 8 rows of outputs at a time.
// The window of these outputs is the part of x that they depend on. The thread reads each row of
// the window once and adds its products to all outputs that depend on it. The weights are in
// registers. Results overwrite rows of x that are no longer needed. At the end the warp stores all
// images. The copies of other warps overlap with the math. The zeros below an image are neither
// read nor multiplied. If an image has 8 columns, the zeros to its right are not read or multiplied
// either.
// NOTE: a weight of inf or NaN times such a zero would be NaN. Therefore, if a weight is inf or
// NaN, the kernel later corrects the outputs near the bottom and the right edge.
#include "device/dispatch.cuh"
#include "device/mma_sync.cuh"
#include "device/reduce.cuh"
#include "puzzles/conv2d/tiles.cuh"

namespace torchweld {
namespace {

constexpr int kElems = 4;  // number of elements in a 16-byte vector

// kAcross threads side by side compute an image.
template <int kTile, int kAcross_, bool kFlipped_>
struct SmallConfig {
  static constexpr SmallTile kShape = kSmallTiles[kTile];
  static constexpr int kSize = kShape.size;
  static constexpr int kAcross = kAcross_;
  static constexpr bool kFlipped = kFlipped_;
  static constexpr int kWidth = kSmallColumns * kAcross;
  static constexpr int kImages = kWarp / kAcross;  // the number of images per warp
  // kWindow is the number of columns in a thread's window. If an image has 8 columns, the window
  // has only the columns inside the image.
  static constexpr int kBeside = kAcross == 1 ? 0 : (kSize - 1 + kElems - 1) / kElems * kElems;
  static constexpr int kWindow = kSmallColumns + kBeside;
};

struct SmallPlan {
  FastDivisor by_image;  // divides by the number of rows of an image
  int height;
  int pitch;        // number of floats from one image in shared memory to the next
  bool contiguous;  // whether x and z are contiguous, aligned and as wide as the tile
};

// Calls body(g_offset, s_offset) for every 16-byte vector of the warp's contiguous images. g_offset
// and s_offset are the offsets of the vector from the first image, in global memory and in shared
// memory. The function handles 4 rows of several images at a time, so that both offsets advance by
// constants and need no divisions.
template <typename Config, typename Body>
__device__ __forceinline__ void for_each_access(const SmallPlan& plan, int images,
                                                const Body& body) {
  constexpr int kRows = 4;
  constexpr int kPerImage = kRows * Config::kWidth / kElems;
  constexpr int kImagesAtOnce = kWarp / kPerImage;
  const int lane = threadIdx.x % kWarp, first_image = lane / kPerImage;
  const int floats = plan.height * Config::kWidth;
#pragma unroll 1
  for (int first = 0; first < plan.height; first += kRows) {
    const int offset = first * Config::kWidth + lane % kPerImage * kElems;
    if (offset >= floats) continue;
    int g_offset = first_image * floats + offset, s_offset = first_image * plan.pitch + offset;
#pragma unroll 8
    for (int i = first_image; i < images; i += kImagesAtOnce) {
      body(g_offset, s_offset);
      g_offset += kImagesAtOnce * floats;
      s_offset += kImagesAtOnce * plan.pitch;
    }
  }
}

// Copies the warp's images to shared memory, with zeros to the right of each row.
template <typename Config>
__device__ __forceinline__ void stage_images(float* s_x, const Conv2dArgs<float>& args,
                                             const SmallPlan& plan, int64_t first_image,
                                             int images) {
  const int lane = threadIdx.x % kWarp;
  const uint32_t s_to = shared_address(s_x);
  const float* g_first = args.g_x + first_image * args.x_batch_stride;
  if (plan.contiguous) {
    for_each_access<Config>(plan, images, [&](int g_offset, int s_offset) {
      copy_async_16(s_to + 4 * s_offset, g_first + g_offset, 16);
    });
  } else {
    for (int i = lane; i < images * plan.height * Config::kWidth; i += kWarp) {
      const int row = i / Config::kWidth, image = plan.by_image.divide(row);
      const int column = i % Config::kWidth;
      const bool valid = column < args.width;
      const float* g_row =
          g_first + image * args.x_batch_stride + (row - image * plan.height) * args.x_row_stride;
      copy_async_4(s_to + 4 * (i + image * kElems), valid ? g_row + column : args.g_x,
                   valid ? 4 : 0);
    }
  }
  copy_async_commit();
}

// Stores the warp's images from shared memory to z.
template <typename Config>
__device__ __forceinline__ void store_images(const float* s_z, const Conv2dArgs<float>& args,
                                             const SmallPlan& plan, int64_t first_image,
                                             int images) {
  const int lane = threadIdx.x % kWarp;
  float* g_z = args.g_z + first_image * args.height * args.width;
  if (plan.contiguous) {
    for_each_access<Config>(plan, images, [&](int g_offset, int s_offset) {
      store_vec(g_z + g_offset, load_vec<float, kElems>(s_z + s_offset));
    });
    return;
  }
  for (int i = lane; i < images * plan.height * Config::kWidth; i += kWarp) {
    const int row = i / Config::kWidth, column = i % Config::kWidth;
    if (column >= args.width) continue;
    g_z[row * args.width + column] = s_z[i + plan.by_image.divide(row) * kElems];
  }
}

// An image in shared memory, as a thread sees it: the thread's 8 columns and the columns beside
// these. Rows and columns are in the order in which the thread processes them.
template <typename Config>
struct SmallImage {
  float* s_first;  // the address of the thread's columns in the first row
  bool has_beside;

  __device__ __forceinline__ float* row(int row) const {
    return s_first + (Config::kFlipped ? -row : row) * Config::kWidth;
  }
  __device__ __forceinline__ void load(float (&r_x)[Config::kWindow], int index) const {
    const float* s_row = row(index);
#pragma unroll
    for (int c = 0; c < Config::kWindow; c += kElems) {
      Vec<float, kElems> in = {};
      if (c < kSmallColumns || has_beside) {
        in = load_vec<float, kElems>(s_row + (Config::kFlipped ? kSmallColumns - kElems - c : c));
      }
#pragma unroll
      for (int e = 0; e < kElems; ++e)
        r_x[c + e] = in.values[Config::kFlipped ? kElems - 1 - e : e];
    }
  }
  __device__ __forceinline__ void store(const float (&r_z)[kSmallColumns], int index) const {
    float* s_row = row(index);
#pragma unroll
    for (int c = 0; c < kSmallColumns; c += kElems) {
      Vec<float, kElems> out;
#pragma unroll
      for (int e = 0; e < kElems; ++e)
        out.values[e] = r_z[c + (Config::kFlipped ? kElems - 1 - e : e)];
      store_vec(s_row + (Config::kFlipped ? kSmallColumns - kElems - c : c), out);
    }
  }
};

// Computes the thread's outputs. The outputs overwrite x in shared memory. All lanes of the warp
// must call this function.
template <typename Config>
__device__ __forceinline__ void convolve_image(
    const SmallImage<Config>& image, int height,
    const float (&r_weight)[Config::kSize][Config::kSize]) {
  constexpr int kSize = Config::kSize;
  constexpr int kRows = kSmallRows;
#pragma unroll 1
  for (int first = 0; first < height; first += kRows) {
    float r_z[kRows][kSmallColumns] = {};
#pragma unroll
    for (int step = 0; step < kRows + kSize - 1; ++step) {
      if (first + step >= height) break;
      float r_x[Config::kWindow];
      image.load(r_x, first + step);
#pragma unroll
      for (int p = 0; p < kSize; ++p) {
        const int r = step - p;
        if (r < 0 || r >= kRows) continue;
#pragma unroll
        for (int q = 0; q < kSize; ++q) {
#pragma unroll
          for (int c = 0; c < kSmallColumns; ++c) {
            if (c + q >= Config::kWindow) continue;
            r_z[r][c] = fmaf(r_weight[p][q], r_x[c + q < Config::kWindow ? c + q : 0], r_z[r][c]);
          }
        }
      }
    }
    if (Config::kAcross > 1) __syncwarp();  // the other thread of the image has read these rows
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (first + r < height) image.store(r_z[r], first + r);
    }
  }
}

// Adds the products of weights with zeros outside the image. convolve_image skips these products.
template <typename Config>
__device__ __forceinline__ void mark_edges(const SmallImage<Config>& image, int height,
                                           const float* g_weight) {
  for (int i = 0; i < height; ++i) {
    for (int c = 0; c < kSmallColumns; ++c) {
      float& z = image.row(i)[Config::kFlipped ? kSmallColumns - 1 - c : c];
      for (int p = 0; p < Config::kSize; ++p) {
        for (int q = 0; q < Config::kSize; ++q) {
          if (i + p < height && c + q < Config::kWindow) continue;
          z = fmaf(g_weight[p * Config::kSize + q], 0.f, z);
        }
      }
    }
  }
}

template <typename Config>
__global__ __launch_bounds__(kSmallThreads, Config::kShape.blocks_per_sm) void conv2d_small_kernel(
    const Conv2dArgs<float> args, const SmallPlan plan) {
  extern __shared__ __align__(16) float s_base[];
  constexpr int kSize = Config::kSize;
  const int lane = threadIdx.x % kWarp;
  float* s_images = s_base + threadIdx.x / kWarp * Config::kImages * plan.pitch;
  const int64_t run = (args.first_block + blockIdx.x) * kSmallWarps + threadIdx.x / kWarp;
  const int64_t first_image = run * Config::kImages;
  if (first_image >= args.batch) return;
  const int64_t left = args.batch - first_image;
  const int images = left < Config::kImages ? static_cast<int>(left) : Config::kImages;
  stage_images<Config>(s_images, args, plan, first_image, images);

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

  // NOTE: lanes that process the same half of the columns are consecutive. They have no bank
  // conflicts, because the pitch of an image is an odd number of vectors. Lanes without an image
  // compute with undefined values, and their results are not stored.
  const int across = lane / Config::kImages;
  float* s_first = s_images + lane % Config::kImages * plan.pitch + across * kSmallColumns;
  if (Config::kFlipped) s_first += (plan.height - 1) * Config::kWidth;
  const SmallImage<Config> image = {s_first,
                                    Config::kFlipped ? across > 0 : across + 1 < Config::kAcross};
  convolve_image<Config>(image, plan.height, r_weight);
  if (isnan(check)) mark_edges<Config>(image, plan.height, args.g_weight);
  __syncwarp();
  store_images<Config>(s_images, args, plan, first_image, images);
}

template <typename Config>
void launch_config(const Conv2dParams& params, cudaStream_t stream) {
  const int height = static_cast<int>(params.height);
  const int pitch = height * Config::kWidth + kElems;
  const int bytes = 4 * kSmallWarps * Config::kImages * pitch;
  const int64_t images = kSmallWarps * Config::kImages;  // the number of images per block
  for_each_grid(conv2d_args<float>(params, 1, 1), (params.batch + images - 1) / images,
                [&](const Conv2dArgs<float>& args, int64_t blocks) {
                  const bool contiguous =
                      args.aligned && params.width == Config::kWidth &&
                      (height == 1 || params.x_row_stride == params.width) &&
                      (params.batch == 1 || params.x_batch_stride == height * params.width);
                  const SmallPlan plan = {FastDivisor(height), height, pitch, contiguous};
                  launch_kernel(conv2d_small_kernel<Config>, {blocks, kSmallThreads, bytes}, stream,
                                args, plan);
                });
}

}  // namespace

void launch_conv2d_small(const Conv2dParams& params, cudaStream_t stream) {
  dispatch_index<kNumSmallTiles>(tile_of_size(kSmallTiles, params.kernel_height), [&](auto tile) {
    constexpr int kTile = tile.value;
    if (params.width <= kSmallColumns) {
      if (params.flipped) return launch_config<SmallConfig<kTile, 1, true>>(params, stream);
      return launch_config<SmallConfig<kTile, 1, false>>(params, stream);
    }
    if constexpr (kSmallTiles[kTile].width > kSmallColumns) {
      if (params.flipped) return launch_config<SmallConfig<kTile, 2, true>>(params, stream);
      launch_config<SmallConfig<kTile, 2, false>>(params, stream);
    }
  });
}

}  // namespace torchweld
