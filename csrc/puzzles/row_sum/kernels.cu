// Sums over the last dim:  y[r] = sum_j x[r, j]       x (rows, n), y (rows,)
//
// If rows are short, up to 32 lanes of a warp sum a row. If short rows are contiguous and
// unaligned, a block first copies several rows to shared memory. Longer rows have one block per
// row. If there are few long rows, each row is divided into splits, with one block per split. The
// block that finishes last in a row adds up the partials of the row's splits. Every sum is added in
// a fixed order, so sums have the same bits in every run.
//
// Error bound. In each round, a thread makes kLoads accesses of 16 bytes. Each of these accesses
// has its own accumulator. A value goes through up to 3 additions within its access and up to 16
// additions to the accumulator. Every 16 rounds, the thread adds up its accumulators, adds the
// result to its sum, and clears the accumulators. All other additions of accumulators, threads and
// splits are at most 60. Therefore the error is at most
//   (80 + n / 65536) * 2^-24 * sum |x|, plus the rounding of the result.
#include "core/choices.h"
#include "core/launch.h"
#include "device/dispatch.cuh"
#include "device/reduce.cuh"
#include "puzzles/row_sum/row_sum.h"

namespace torchweld {
namespace {

constexpr int kRoundsInAccumulator = 16;

template <typename T_, int kTile>
struct RowSumConfig {
  using T = T_;
  static constexpr int kRowThreads = kRowSumTiles[kTile].threads;
  static constexpr int kLoads = kRowSumTiles[kTile].loads;
  static constexpr int kRowsPerBlock = kRowSumThreads / kRowThreads;
  static_assert(kRowThreads <= kWarp || kRowThreads == kRowSumThreads);
};

template <typename T>
struct RowSumArgs {
  const T* g_x;
  T* g_y;
  int64_t rows;
  int64_t n;
  int64_t row_stride;
  int splits;
  int64_t split_elems;
  float* g_partials;
  unsigned* g_counters;
};

// Adds the values of an array in pairs.
template <int kCount>
__device__ __forceinline__ float pairwise_sum(const float (&r_x)[kCount]) {
  float r_sums[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) r_sums[i] = r_x[i];
#pragma unroll
  for (int step = 1; step < kCount; step *= 2) {
#pragma unroll
    for (int i = 0; i + step < kCount; i += 2 * step) r_sums[i] += r_sums[i + step];
  }
  return r_sums[0];
}

template <typename T, int kElems>
__device__ __forceinline__ float sum_of(const Vec<T, kElems>& x) {
  float r_x[kElems];
#pragma unroll
  for (int j = 0; j < kElems; ++j) r_x[j] = to_float(x.values[j]);
  return pairwise_sum(r_x);
}

// Returns the number of elements between g_from and the first 16-byte boundary.
template <typename T>
__device__ __forceinline__ int elems_to_boundary(const T* g_from) {
  const int past = static_cast<int>(reinterpret_cast<uintptr_t>(g_from) % kVectorBytes);
  return (kVectorBytes - past) % kVectorBytes / static_cast<int>(sizeof(T));
}

// Returns the partial sum of one thread. kRowThreads threads together sum n elements, and `lane` is
// the index of this thread.
template <typename Config>
__device__ __forceinline__ float thread_sum(const typename Config::T* g_from, int64_t n, int lane) {
  using T = typename Config::T;
  constexpr int kElems = kVectorBytes / sizeof(T);
  constexpr int kRowThreads = Config::kRowThreads;
  constexpr int kLoads = Config::kLoads;
  const int to_boundary = elems_to_boundary(g_from);
  const int64_t head = to_boundary < n ? to_boundary : n;
  const T* g_body = g_from + head;
  const int64_t accesses = (n - head) / kElems;

  float sum = 0.f;
  for (int64_t i = lane; i < accesses;) {
    float r_sums[kLoads] = {};
#pragma unroll 1
    for (int round = 0; round < kRoundsInAccumulator && i < accesses; ++round) {
      Vec<T, kElems> r_in[kLoads];
#pragma unroll
      for (int k = 0; k < kLoads; ++k) {
        r_in[k] = {};
        if (i + k * kRowThreads < accesses) {
          r_in[k] = load_vec<T, kElems>(g_body + (i + k * kRowThreads) * kElems);
        }
      }
#pragma unroll
      for (int k = 0; k < kLoads; ++k) r_sums[k] += sum_of(r_in[k]);
      i += kLoads * kRowThreads;
    }
    sum += pairwise_sum(r_sums);
  }
  // Add the elements before the first and behind the last 16-byte boundary.
  for (int64_t i = lane; i < head; i += kRowThreads) sum += to_float(g_from[i]);
  for (int64_t i = head + accesses * kElems + lane; i < n; i += kRowThreads) {
    sum += to_float(g_from[i]);
  }
  return sum;
}

// Sums short rows. Up to one warp sums a row, and a block sums several rows.
template <typename Config>
__global__ __launch_bounds__(kRowSumThreads) void row_sum_rows_kernel(
    const RowSumArgs<typename Config::T> args) {
  constexpr int kRowThreads = Config::kRowThreads;
  const int64_t row =
      static_cast<int64_t>(blockIdx.x) * Config::kRowsPerBlock + threadIdx.x / kRowThreads;
  const int lane = threadIdx.x % kRowThreads;
  float sum = 0.f;
  if (row < args.rows) sum = thread_sum<Config>(args.g_x + row * args.row_stride, args.n, lane);
#pragma unroll
  for (int step = kRowThreads / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (lane == 0 && row < args.rows) args.g_y[row] = from_float<typename Config::T>(sum);
}

// Sums long rows. A block sums one row or one split of a row.
template <typename Config>
__global__ __launch_bounds__(kRowSumThreads) void row_sum_split_kernel(
    const RowSumArgs<typename Config::T> args) {
  using T = typename Config::T;
  __shared__ BlockExchange<kRowSumThreads> s_exchange, s_split_exchange;
  __shared__ bool s_last;
  const unsigned row = blockIdx.x / args.splits, split = blockIdx.x % args.splits;
  const int64_t begin = split * args.split_elems;
  const int64_t left = args.n - begin;
  const int64_t count = left < args.split_elems ? left : args.split_elems;
  float sum = thread_sum<Config>(args.g_x + row * args.row_stride + begin, count, threadIdx.x);
  sum = s_exchange.sum_warps(warp_sum(sum));
  if (args.splits == 1) {
    if (threadIdx.x == 0) args.g_y[row] = from_float<T>(sum);
    return;
  }

  float* g_partials = args.g_partials + static_cast<int64_t>(row) * args.splits;
  if (threadIdx.x == 0) {
    g_partials[split] = sum;
    __threadfence();  // makes the partial visible before the counter is incremented
    s_last = atomicAdd(args.g_counters + row, 1u) == static_cast<unsigned>(args.splits - 1);
  }
  __syncthreads();
  if (!s_last) return;
  __threadfence();
  sum = 0.f;
  for (int i = threadIdx.x; i < args.splits; i += kRowSumThreads) sum += __ldcg(g_partials + i);
  sum = s_split_exchange.sum_warps(warp_sum(sum));
  if (threadIdx.x == 0) {
    args.g_y[row] = from_float<T>(sum);
    args.g_counters[row] = 0;  // reset the counter for the next launch
  }
}

// Sums contiguous short rows. A block copies rows_per_block rows to shared memory. Then
// kRowSumThreads / rows_per_block threads sum each row. rows_per_block must be a power of two.
template <typename T>
__global__ __launch_bounds__(kRowSumThreads) void row_sum_staged_kernel(const T* g_x, T* g_y,
                                                                        int64_t rows, int n,
                                                                        int rows_per_block) {
  constexpr int kElems = kVectorBytes / sizeof(T);
  constexpr int kLoads = kStagedBytes / kVectorBytes / kRowSumThreads;
  constexpr int kSums = 4;
  // NOTE: in shared memory, the first row has the same offset from a 16-byte boundary as in global
  // memory. Therefore both the source and the destination of a copy are aligned. The array is one
  // access longer than kStagedBytes, because of this offset.
  __shared__ alignas(kVectorBytes) T s_x[kStagedBytes / sizeof(T) + kElems];
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * rows_per_block;
  const int64_t rows_left = rows - first_row;
  const int count = n * static_cast<int>(rows_left < rows_per_block ? rows_left : rows_per_block);
  const T* g_from = g_x + first_row * n;
  const int to_boundary = elems_to_boundary(g_from);
  T* s_from = s_x + (kElems - to_boundary) % kElems;
  const int head = to_boundary < count ? to_boundary : count;
  const int accesses = (count - head) / kElems;

  Vec<T, kElems> r_in[kLoads];
#pragma unroll
  for (int k = 0; k < kLoads; ++k) {
    const int i = k * kRowSumThreads + threadIdx.x;
    if (i < accesses) r_in[k] = load_vec<T, kElems>(g_from + head + i * kElems);
  }
#pragma unroll
  for (int k = 0; k < kLoads; ++k) {
    const int i = k * kRowSumThreads + threadIdx.x;
    if (i < accesses) store_vec(s_from + head + i * kElems, r_in[k]);
  }
  const int tail = head + accesses * kElems + threadIdx.x;
  if (threadIdx.x < head) s_from[threadIdx.x] = g_from[threadIdx.x];
  if (tail < count) s_from[tail] = g_from[tail];
  __syncthreads();

  const int row_threads = kRowSumThreads / rows_per_block;
  const int row = threadIdx.x / row_threads, lane = threadIdx.x % row_threads;
  float r_sums[kSums] = {};
  if (row < rows_left) {
    for (int i = lane; i < n; i += kSums * row_threads) {
#pragma unroll
      for (int k = 0; k < kSums; ++k) {
        const int j = i + k * row_threads;
        if (j < n) r_sums[k] += to_float(s_from[row * n + j]);
      }
    }
  }
  float sum = pairwise_sum(r_sums);
  for (int step = row_threads / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (lane == 0 && row < rows_left) g_y[first_row + row] = from_float<T>(sum);
}

template <typename T>
void launch_staged(const RowSumArgs<T>& args, cudaStream_t stream) {
  const int64_t row_bytes = args.n * static_cast<int64_t>(sizeof(T));
  int rows_per_block = kRowSumThreads;
  while (rows_per_block * row_bytes > kStagedBytes) rows_per_block /= 2;
  static_assert(kStagedBytes / kStagedRowBytes >=
                kRowSumThreads / kWarp);  // at most one warp sums a row
  for (int64_t first = 0; first < args.rows; first += kMaxGrid * rows_per_block) {
    const int64_t blocks = (args.rows - first + rows_per_block - 1) / rows_per_block;
    launch_kernel(row_sum_staged_kernel<T>, {std::min(blocks, kMaxGrid), kRowSumThreads}, stream,
                  args.g_x + first * args.n, args.g_y + first, args.rows - first,
                  static_cast<int>(args.n), rows_per_block);
  }
}

template <typename T, int kTile>
void launch_tile(RowSumArgs<T> args, cudaStream_t stream) {
  using Config = RowSumConfig<T, kTile>;
  const int64_t max_rows = kMaxGrid / args.splits * Config::kRowsPerBlock;
  const int64_t rows = args.rows;
  for (int64_t first = 0; first < rows; first += max_rows) {
    args.rows = rows - first < max_rows ? rows - first : max_rows;
    const int64_t groups = (args.rows + Config::kRowsPerBlock - 1) / Config::kRowsPerBlock;
    const Grid grid(groups * args.splits, kRowSumThreads);
    if constexpr (Config::kRowThreads <= kWarp) {
      launch_kernel(row_sum_rows_kernel<Config>, grid, stream, args);
    } else {
      launch_kernel(row_sum_split_kernel<Config>, grid, stream, args);
    }
    args.g_x += max_rows * args.row_stride;
    args.g_y += max_rows;
  }
}

}  // namespace

void launch_row_sum(const RowSumParams& params, cudaStream_t stream) {
  dispatch_dtype(params.dtype, [&](auto element) {
    using T = decltype(element);
    const RowSumArgs<T> args = {static_cast<const T*>(params.x),
                                static_cast<T*>(params.y),
                                params.rows,
                                params.n,
                                params.row_stride,
                                static_cast<int>(params.choice.splits),
                                params.choice.split_elems,
                                params.partials,
                                params.counters};
    if (params.choice.engine == RowSumEngine::kStaged) return launch_staged(args, stream);
    dispatch_index<kNumRowSumTiles>(params.choice.tile,
                                    [&](auto tile) { launch_tile<T, tile.value>(args, stream); });
  });
  check_launch("row_sum");
}

}  // namespace torchweld
