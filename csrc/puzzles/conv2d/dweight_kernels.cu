// Computes dweight, the gradient of the weight of a convolution.
//   dweight[p, q] = sum_bij dz[b, i, j] * x[b, i + p, j + q]
// x is 0 behind the bottom and the right edge of an image.
//
// A block computes kTaps x kTaps weights of dweight. It sums over a slice of the outputs. A thread
// processes kWeightRows outputs of one column at a time, from top to bottom. The thread's window of
// x is in registers. The block writes its partials, and a second kernel adds up the partials of all
// blocks. Both kernels add in a fixed order, so the sums have the same bits in every run.
#include "device/dispatch.cuh"
#include "device/reduce.cuh"
#include "puzzles/conv2d/tiles.cuh"

namespace torchweld {
namespace {

template <typename T>
struct WeightArgs {
  const T* g_dz;
  const T* g_x;
  T* g_dweight;
  float* g_partials;  // (chunks, blocks, taps * taps)
  int64_t height, width;
  int64_t kernel_height, kernel_width;
  int64_t dz_batch_stride, dz_row_stride;
  int64_t x_batch_stride, x_row_stride;
  int64_t chunks_across;
  int blocks;
  int64_t items;  // number of items in all images; add_item says what an item is
  Divider by_width, by_row_blocks;
};

// Adds the products of one item to r_sums, for the kTaps x kTaps weights from (p0, q0) on. An item
// is up to kWeightRows consecutive outputs in one column of an image.
template <typename T, int kTaps>
__device__ __forceinline__ void add_item(float (&r_sums)[kTaps][kTaps], const WeightArgs<T>& args,
                                         int64_t item, int64_t p0, int64_t q0) {
  const int64_t row_block = args.by_width.divide(item);
  const int64_t j = item - row_block * args.width;
  const int64_t image = args.by_row_blocks.divide(row_block);
  const int64_t i = (row_block - image * args.by_row_blocks.divisor()) * kWeightRows;
  const auto at_most = [](int64_t n, int limit) { return n < limit ? static_cast<int>(n) : limit; };
  const int rows = at_most(args.height - i, kWeightRows);
  // The number of rows of the window that lie inside x.
  const int x_rows = at_most(args.height - i - p0, kWeightRows + kTaps);
  const int x_columns = at_most(args.width - j - q0, kTaps);
  const T* g_dz = args.g_dz + image * args.dz_batch_stride + i * args.dz_row_stride + j;
  const T* g_x = args.g_x + image * args.x_batch_stride + (i + p0) * args.x_row_stride + j + q0;

  float r_x[kTaps][kTaps];  // row s of x is in r_x[s % kTaps]
  for (int first = 0; first < rows + kTaps - 1; first += kTaps) {
#pragma unroll
    for (int u = 0; u < kTaps; ++u) {
      // Row `step` of x completes the window of the output in row step - (kTaps - 1).
      const int step = first + u;
#pragma unroll
      for (int q = 0; q < kTaps; ++q) {
        const bool valid = step < x_rows && q < x_columns;
        r_x[u][q] = valid ? to_float(g_x[step * args.x_row_stride + q]) : 0.f;
      }
      const int row = step - (kTaps - 1);
      if (row < 0 || row >= rows) continue;
      const float dz = to_float(g_dz[row * args.dz_row_stride]);
#pragma unroll
      for (int p = 0; p < kTaps; ++p) {
#pragma unroll
        for (int q = 0; q < kTaps; ++q) {
          r_sums[p][q] = fmaf(dz, r_x[(u + 1 + p) % kTaps][q], r_sums[p][q]);
        }
      }
    }
  }
}

template <typename T, int kTaps>
__global__ __launch_bounds__(kWeightThreads) void conv2d_dweight_kernel(const WeightArgs<T> args) {
  constexpr int kWarps = kWeightThreads / kWarp;
  constexpr int kSums = kTaps * kTaps;
  __shared__ float s_sums[kWarps][kSums];
  const int64_t chunk = blockIdx.x / args.blocks;
  const int block = blockIdx.x % args.blocks;
  const int64_t p0 = chunk / args.chunks_across * kTaps;
  const int64_t q0 = chunk % args.chunks_across * kTaps;
  const int64_t stride = static_cast<int64_t>(args.blocks) * kWeightThreads;

  float r_sums[kTaps][kTaps] = {};
  for (int64_t item = static_cast<int64_t>(block) * kWeightThreads + threadIdx.x; item < args.items;
       item += stride) {
    add_item(r_sums, args, item, p0, q0);
  }
#pragma unroll
  for (int p = 0; p < kTaps; ++p) {
#pragma unroll
    for (int q = 0; q < kTaps; ++q) {
      const float sum = warp_sum(r_sums[p][q]);
      if (threadIdx.x % kWarp == 0) s_sums[threadIdx.x / kWarp][p * kTaps + q] = sum;
    }
  }
  __syncthreads();
  if (threadIdx.x >= kSums) return;
  float sum = 0.f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += s_sums[w][threadIdx.x];
  args.g_partials[static_cast<int64_t>(blockIdx.x) * kSums + threadIdx.x] = sum;
}

// Adds up the partials of all blocks. Each weight has one warp.
template <typename T>
__global__ __launch_bounds__(kWarp) void add_partials_kernel(const WeightArgs<T> args, int taps) {
  const int64_t p = blockIdx.x / args.kernel_width, q = blockIdx.x % args.kernel_width;
  const int64_t chunk = p / taps * args.chunks_across + q / taps;
  const int64_t sums = static_cast<int64_t>(taps) * taps;
  const float* g_from = args.g_partials + chunk * args.blocks * sums + p % taps * taps + q % taps;
  float sum = 0.f;
  for (int block = threadIdx.x; block < args.blocks; block += kWarp) sum += g_from[block * sums];
  sum = warp_sum(sum);
  if (threadIdx.x == 0) args.g_dweight[blockIdx.x] = from_float<T>(sum);
}

template <typename T>
void launch_dweight(const Conv2dWeightParams& params, cudaStream_t stream) {
  const int64_t row_blocks = (params.height + kWeightRows - 1) / kWeightRows;
  const Conv2dWeightSplit& split = params.split;
  const WeightArgs<T> args = {static_cast<const T*>(params.dz),
                              static_cast<const T*>(params.x),
                              static_cast<T*>(params.dweight),
                              params.partials,
                              params.height,
                              params.width,
                              params.kernel_height,
                              params.kernel_width,
                              params.dz_batch_stride,
                              params.dz_row_stride,
                              params.x_batch_stride,
                              params.x_row_stride,
                              split.chunks_across,
                              static_cast<int>(split.blocks),
                              params.batch * row_blocks * params.width,
                              Divider(params.width),
                              Divider(row_blocks)};
  const auto kernel = split.taps == 3   ? conv2d_dweight_kernel<T, 3>
                      : split.taps == 4 ? conv2d_dweight_kernel<T, 4>
                      : split.taps == 5 ? conv2d_dweight_kernel<T, 5>
                                        : conv2d_dweight_kernel<T, 7>;
  launch_kernel(kernel, {split.chunks * split.blocks, kWeightThreads}, stream, args);
  const int64_t weights = params.kernel_height * params.kernel_width;
  launch_kernel(add_partials_kernel<T>, {weights, kWarp}, stream, args, split.taps);
}

}  // namespace

void launch_conv2d_dweight(const Conv2dWeightParams& params, cudaStream_t stream) {
  dispatch_dtype(params.dtype,
                 [&](auto element) { launch_dweight<decltype(element)>(params, stream); });
  check_launch("conv2d_backward");
}

}  // namespace torchweld
