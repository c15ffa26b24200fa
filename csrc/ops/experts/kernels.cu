// The kernels that gather the tokens of a layer of experts and sum its rows. A warp processes
// columns of one token or of one row, in accesses of 16 bytes.
#include "device/scan.cuh"
#include "ops/experts/rows.cuh"

namespace torchweld {
namespace {

constexpr int kPartRows = 256;

// A lane of gather_kernel loads this many accesses of kElems elements before it stores them.
constexpr int kGatherAccesses = 4;
constexpr int gather_columns(int elems) { return kGatherAccesses * 32 * elems; }

// The rows of a token's routes: lane j has that of route first + j, or -1.
__device__ __forceinline__ int rows_of_token(const ExpertRoutes& r, int64_t token, int first) {
  const int j = first + static_cast<int>(threadIdx.x % 32);
  return j < r.k ? r.rows[token * r.k + j] : -1;
}

// The token of a warp and the first of its kColumns columns of n. Returns false if there is none.
// Warps with consecutive indices have consecutive columns, so that a block reads whole rows.
template <int kColumns>
__device__ __forceinline__ bool part_of_token(const ExpertRoutes& r, int64_t n, int64_t& token,
                                              int64_t& column) {
  const auto warp = static_cast<uint32_t>(warp_index()),
             parts = static_cast<uint32_t>(divide_up(n, kColumns));
  token = warp / parts;
  column = int64_t(warp - static_cast<uint32_t>(token) * parts) * kColumns;
  return token < r.tokens;
}

// A warp reads columns of a token once and writes them to the rows of its routes.
template <typename T, int kElems>
__global__ void __launch_bounds__(kThreads)
    gather_kernel(const RouteRows to, const T* g_x, int64_t x_stride,
                  const __grid_constant__ ExpertRoutes r) {
  int64_t token, column;
  const int lane = threadIdx.x % 32;
  griddep_launch_dependents();
  griddep_wait();
  if (!part_of_token<gather_columns(kElems)>(r, to.n, token, column)) return;
  AccessOf<kElems> values[kGatherAccesses];
#pragma unroll
  for (int i = 0; i < kGatherAccesses; ++i) {
    const int64_t at = column + (i * 32 + lane) * kElems;
    values[i] = load_access_if<T, kElems>(g_x + token * x_stride + at, at < to.n);
  }
  for (int first = 0; first < r.k; first += 32) {
    const int rows = rows_of_token(r, token, first), count = min(32, r.k - first);
    for (int j = 0; j < count; ++j) {
      const int row = __shfl_sync(~0u, rows, j);
      if (row < 0) continue;
      T* g_to = static_cast<T*>(to.data) + row * to.stride;
#pragma unroll
      for (int i = 0; i < kGatherAccesses; ++i) {
        const int64_t at = column + (i * 32 + lane) * kElems;
        store_bits_if(g_to + at, values[i], at < to.n);
      }
      if (column == 0) clear_padding(g_to, to);
    }
  }
}

// A warp sums columns of the rows of one token.
template <typename T, int kElems>
__global__ void __launch_bounds__(kThreads)
    sum_routes_kernel(T* g_y, const RouteRows from, const void* g_weight, bool weight_fp32,
                      const __grid_constant__ ExpertRoutes r) {
  constexpr int kAtOnce = 8;
  int64_t token, column;
  const int lane = threadIdx.x % 32;
  griddep_launch_dependents();
  griddep_wait();
  if (!part_of_token<32 * kElems>(r, from.n, token, column)) return;
  column += lane * kElems;
  const bool there = column < from.n;
  const T* g_from = static_cast<const T*>(from.data) + column;
  float sums[kElems] = {};
  for (int first = 0; first < r.k; first += 32) {
    const int own_row = rows_of_token(r, token, first);
    float own_weight = 1.f;
    if (g_weight != nullptr && first + lane < r.k) {
      own_weight = weight_of(g_weight, weight_fp32, token * r.k + first + lane, T());
    }
    const int count = min(32, r.k - first);
    for (int j = 0; j < count; j += kAtOnce) {
      AccessOf<kElems> values[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {  // lanes without a route have row -1
        const int row = __shfl_sync(~0u, own_row, j + i);
        values[i] = load_access_if<T, kElems>(g_from + row * from.stride, there && row >= 0);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float weight = __shfl_sync(~0u, own_weight, j + i);
        if (__shfl_sync(~0u, own_row, j + i) < 0) continue;
        float row[kElems];
        access_floats<T>(row, values[i]);
#pragma unroll
        for (int e = 0; e < kElems; ++e) sums[e] = fmaf(weight, row[e], sums[e]);
      }
    }
  }
  store_access_if(g_y + token * from.n + column, sums, there);
}

// The rows of an expert are summed in parts of kPartRows rows. The parts of all experts lie one
// after the other; between the parts of two experts there may be an unused one.
__device__ __forceinline__ int first_row_of(const ExpertRoutes& r, int expert) {
  return expert == 0 ? 0 : r.ends[expert - 1];
}
__device__ __forceinline__ int first_part_of(const ExpertRoutes& r, int expert) {
  return first_row_of(r, expert) / kPartRows + expert;
}

// A block sums kElems columns per lane of one part: each warp sums an eighth of the rows.
template <typename T, int kElems>
__global__ void __launch_bounds__(kThreads)
    sum_parts_kernel(float* g_parts, const RouteRows from, const void* g_weight, bool weight_fp32,
                     int column_blocks, const __grid_constant__ ExpertRoutes r) {
  constexpr int kWarpRows = kPartRows / kWarps, kColumns = 32 * kElems;
  __shared__ float s_sums[kWarps][kColumns];
  griddep_launch_dependents();
  griddep_wait();
  const int part = blockIdx.x / column_blocks, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int expert =
      last_at_or_before(r.experts, part, [&](int expert) { return first_part_of(r, expert); });
  const uint32_t begin = first_row_of(r, expert) +
                         uint32_t(part - first_part_of(r, expert)) * kPartRows + warp * kWarpRows;
  const uint32_t end = min(begin + kWarpRows, uint32_t(r.ends[expert]));
  const int64_t first_column = int64_t(blockIdx.x % column_blocks) * kColumns;
  const int64_t column = first_column + lane * kElems;
  const T* g_from = static_cast<const T*>(from.data) + column;
  float sums[kElems] = {};
#pragma unroll 4
  for (uint32_t row = begin; row < end; ++row) {
    const float weight =
        g_weight == nullptr ? 1.f : weight_of(g_weight, weight_fp32, r.order[row], T());
    float values[kElems];
    access_floats<T>(values,
                     load_access_if<T, kElems>(g_from + row * from.stride, column < from.n));
#pragma unroll
    for (int i = 0; i < kElems; ++i) sums[i] = fmaf(weight, values[i], sums[i]);
  }
#pragma unroll
  for (int i = 0; i < kElems; ++i) s_sums[warp][lane * kElems + i] = sums[i];
  __syncthreads();
  if (threadIdx.x >= kColumns || first_column + threadIdx.x >= from.n) return;
  float sum = 0.f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += s_sums[w][threadIdx.x];
  g_parts[part * from.n + first_column + threadIdx.x] = sum;
}

// A thread adds up the parts of one column of one expert.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    sum_of_experts_kernel(T* g_to, const float* g_parts, int64_t n, int column_blocks,
                          const __grid_constant__ ExpertRoutes r) {
  griddep_launch_dependents();
  griddep_wait();
  const int expert = blockIdx.x / column_blocks;
  const int64_t column = int64_t(blockIdx.x % column_blocks) * kThreads + threadIdx.x;
  if (column >= n) return;
  const int rows = r.ends[expert] - first_row_of(r, expert);
  const float* g_part = g_parts + first_part_of(r, expert) * n + column;
  float sum = 0.f;
#pragma unroll 8
  for (int i = 0; i < divide_up(rows, kPartRows); ++i) sum += g_part[i * n];
  g_to[expert * n + column] = from_float<T>(sum);
}

template <typename T, int kElems>
__global__ void __launch_bounds__(kThreads)
    clear_rows_behind_kernel(const RouteRows to, int64_t count,
                             const __grid_constant__ ExpertRoutes r) {
  griddep_launch_dependents();
  griddep_wait();
  const int64_t row = warp_index();
  if (row < row_count(r) || row >= count) return;
  T* g_row = static_cast<T*>(to.data) + row * to.stride;
  for (int64_t c = threadIdx.x % 32 * kElems; c < to.n; c += 32 * kElems) {
    store_vec(g_row + c, Vec<T, kElems>{});
  }
}

}  // namespace

void launch_gather_tokens(const RouteRows& to, const void* x, int64_t x_stride,
                          const ExpertRoutes& r, DType dtype, cudaStream_t stream) {
  dispatch_access(dtype, to.n, {accessed(to), {x, x_stride}}, [&](auto element, auto elems) {
    using T = decltype(element);
    const int64_t parts = divide_up(to.n, gather_columns(elems.value));
    launch_kernel(gather_kernel<T, elems.value>, overlapping(blocks_of(r.tokens * parts), kThreads),
                  stream, to, static_cast<const T*>(x), x_stride, r);
  });
  check_launch("experts");
}

void launch_sum_routes(void* y, const RouteRows& from, const void* weight, bool weight_fp32,
                       const ExpertRoutes& r, DType dtype, cudaStream_t stream) {
  dispatch_access(dtype, from.n, {accessed(from), {y, from.n}}, [&](auto element, auto elems) {
    using T = decltype(element);
    const int64_t parts = divide_up(from.n, 32 * elems.value);
    launch_kernel(sum_routes_kernel<T, elems.value>,
                  overlapping(blocks_of(r.tokens * parts), kThreads), stream, static_cast<T*>(y),
                  from, weight, weight_fp32, r);
  });
  check_launch("experts");
}

int64_t expert_sum_parts(int64_t rows, int64_t experts) { return rows / kPartRows + experts; }

void launch_sum_of_experts(void* to, const RouteRows& from, int64_t rows, float* parts,
                           const void* weight, bool weight_fp32, const ExpertRoutes& r, DType dtype,
                           cudaStream_t stream) {
  dispatch_access(dtype, from.n, {accessed(from)}, [&](auto element, auto elems) {
    using T = decltype(element);
    const auto blocks = static_cast<int>(divide_up(from.n, 32 * elems.value));
    launch_kernel(sum_parts_kernel<T, elems.value>,
                  overlapping(expert_sum_parts(rows, r.experts) * blocks, kThreads), stream, parts,
                  from, weight, weight_fp32, blocks, r);
    const auto column_blocks = static_cast<int>(divide_up(from.n, kThreads));
    launch_kernel(sum_of_experts_kernel<T>,
                  overlapping(int64_t{column_blocks} * r.experts, kThreads), stream,
                  static_cast<T*>(to), static_cast<const float*>(parts), from.n, column_blocks, r);
  });
  check_launch("experts");
}

void launch_clear_rows_behind(const RouteRows& to, int64_t count, const ExpertRoutes& r,
                              DType dtype, cudaStream_t stream) {
  dispatch_access(dtype, to.n, {accessed(to)}, [&](auto element, auto elems) {
    using T = decltype(element);
    launch_kernel(clear_rows_behind_kernel<T, elems.value>, overlapping(blocks_of(count), kThreads),
                  stream, to, count, r);
  });
  check_launch("experts");
}

}  // namespace torchweld
