// Helpers of the convolution kernels: positions of tiles in a batch of images.
#pragma once

#include "core/fast_divide.h"
#include "core/launch.h"
#include "device/vec.cuh"
#include "puzzles/conv2d/conv2d.h"

namespace torchweld {

// Divides by a number that the host knows. The division is fast if both operands are below 2^31.
class Divider {
 public:
  explicit Divider(int64_t divisor)
      : fast_(divisor < kLimit ? divisor : 1), divisor_(divisor), fits_(divisor < kLimit) {}

  TW_HOST_DEVICE int64_t divide(int64_t n) const {
    if (fits_ && n < kLimit) return fast_.divide(static_cast<uint32_t>(n));
    return n / divisor_;
  }
  TW_HOST_DEVICE int64_t divisor() const { return divisor_; }

 private:
  static constexpr int64_t kLimit = int64_t{1} << 31;
  FastDivisor fast_;
  int64_t divisor_;
  bool fits_;
};

template <typename T>
struct Conv2dArgs {
  const T* g_x;
  const T* g_weight;
  T* g_z;
  int64_t batch, height, width;
  int64_t kernel_height, kernel_width;
  int64_t x_batch_stride, x_row_stride;
  bool flipped;
  bool aligned;         // all rows of x and z start and end on 16-byte boundaries
  int64_t first_block;  // index of the first block of this launch
  Divider by_column_tiles;
  Divider by_image;  // divides by the number of rows, or of row tiles, per image
};

template <typename T>
Conv2dArgs<T> conv2d_args(const Conv2dParams& params, int64_t column_tiles, int64_t per_image) {
  const auto whole = [](int64_t elems) { return elems * sizeof(T) % kVectorBytes == 0; };
  const auto on_boundary = [](const void* g) {
    return reinterpret_cast<uintptr_t>(g) % kVectorBytes == 0;
  };
  const bool aligned = on_boundary(params.x) && on_boundary(params.z) && whole(params.width) &&
                       whole(params.x_row_stride) && whole(params.x_batch_stride);
  return {static_cast<const T*>(params.x),
          static_cast<const T*>(params.weight),
          static_cast<T*>(params.z),
          params.batch,
          params.height,
          params.width,
          params.kernel_height,
          params.kernel_width,
          params.x_batch_stride,
          params.x_row_stride,
          params.flipped,
          aligned,
          0,
          Divider(column_tiles),
          Divider(per_image)};
}

// Splits the blocks into ranges, so that each range fits into one grid. Calls launch(args, blocks)
// for each range.
template <typename T, typename Launch>
void for_each_grid(Conv2dArgs<T> args, int64_t blocks, const Launch& launch) {
  for_each_grid_of(blocks, [&](int64_t first, int64_t count) {
    args.first_block = first;
    launch(args, count);
  });
}

// The images of a batch, stacked along H. kernel_height - 1 rows of zeros follow each image and are
// its padding. The rows of a block may belong to several images.
template <typename T>
struct StackedRows {
  const Conv2dArgs<T>& args;

  // Returns the offset of stacked row `stacked` in x or z, or -1 if this row is a row of zeros.
  __device__ __forceinline__ int64_t offset(int64_t stacked, int64_t batch_stride,
                                            int64_t row_stride) const {
    if (stacked < 0) return -1;
    const int64_t image = args.by_image.divide(stacked);
    const int64_t row = stacked - image * args.by_image.divisor();
    if (image >= args.batch || row >= args.height) return -1;
    return image * batch_stride + row * row_stride;
  }
  __device__ __forceinline__ int64_t offset_in_x(int64_t stacked) const {
    return offset(stacked, args.x_batch_stride, args.x_row_stride);
  }
  __device__ __forceinline__ int64_t offset_in_z(int64_t stacked) const {
    return offset(stacked, args.height * args.width, args.width);
  }
};

// Returns the weight that multiplies element (p, q) of the window of an output.
template <typename T>
__device__ __forceinline__ float weight_at(const Conv2dArgs<T>& args, int64_t p, int64_t q) {
  if (args.flipped) {
    p = args.kernel_height - 1 - p;
    q = args.kernel_width - 1 - q;
  }
  return to_float(args.g_weight[p * args.kernel_width + q]);
}

}  // namespace torchweld
