// Sorts the routes of a layer of experts by expert.
//
// The routes are sorted by counting, in three kernels: each block counts the experts of a chunk of
// routes; one block adds up the counts; each block gives the routes of its chunk their rows. A warp
// processes its routes in order, 32 at a time, and lanes with the same expert get their rows in
// the order of the lanes. No atomic operation decides an order, so the rows are the same in every
// run.
#include "device/scan.cuh"
#include "ops/experts/rows.cuh"

namespace torchweld {
namespace {

constexpr int kMaxSortWarps = 16, kScanThreads = 1024;

// Calls body(route, expert, lanes) for the routes of this warp, 32 at a time. `lanes` is the mask
// of the lanes with the same expert.
template <typename Body>
__device__ __forceinline__ void for_routes_of_warp(const ExpertRoutes& r, const Body& body) {
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t first = int64_t(blockIdx.x) * kRouteChunk + warp * (kRouteChunk / warps);
  for (int i = 0; i < kRouteChunk / warps; i += 32) {
    const int64_t route = first + i + lane;
    const int expert = expert_of(r, route);
    body(route, expert, __match_any_sync(~0u, expert));
  }
}

__global__ void __launch_bounds__(kMaxSortWarps * 32)
    count_routes_kernel(const __grid_constant__ ExpertRoutes r, int* g_counts) {
  extern __shared__ int s_counts[];  // (experts,)
  griddep_launch_dependents();
  griddep_wait();
  for (int e = threadIdx.x; e < r.experts; e += blockDim.x) s_counts[e] = 0;
  __syncthreads();
  for_routes_of_warp(r, [&](int64_t, int expert, uint32_t lanes) {
    // Integers: their sum does not depend on the order.
    if (expert >= 0 && threadIdx.x % 32 == __ffs(lanes) - 1) {
      atomicAdd(&s_counts[expert], __popc(lanes));
    }
  });
  __syncthreads();
  int* g_to = g_counts + int64_t(blockIdx.x) * r.experts;
  for (int e = threadIdx.x; e < r.experts; e += blockDim.x) g_to[e] = s_counts[e];
}

// Replaces each count by the first row of that expert's routes in that chunk.
__global__ void __launch_bounds__(kScanThreads)
    scan_counts_kernel(const __grid_constant__ ExpertRoutes r, int* g_counts, int chunks) {
  __shared__ int s_warps[kScanThreads / 32];
  griddep_launch_dependents();
  griddep_wait();
  const auto count_of = [&](int expert) {
    int count = 0;
#pragma unroll 8
    for (int c = 0; c < chunks; ++c) count += g_counts[int64_t(c) * r.experts + expert];
    return count;
  };
  block_scan(r.experts, s_warps, count_of, [&](int expert, int count, int row) {
    r.ends[expert] = row + count;
#pragma unroll 8
    for (int c = 0; c < chunks; ++c) {
      int& at = g_counts[int64_t(c) * r.experts + expert];
      const int of_chunk = at;
      at = row;
      row += of_chunk;
    }
  });
}

// g_first_rows is nullptr if there is only one chunk: then no other kernel counts its routes.
__global__ void __launch_bounds__(kMaxSortWarps * 32)
    place_routes_kernel(const __grid_constant__ ExpertRoutes r, const int* g_first_rows) {
  extern __shared__ int s_rows[];  // (warps, experts): the next row of each expert
  __shared__ int s_warps[kMaxSortWarps];
  griddep_launch_dependents();
  griddep_wait();
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = threadIdx.x; i < warps * r.experts; i += blockDim.x) s_rows[i] = 0;
  __syncthreads();
  int* s_own = s_rows + warp * r.experts;
  for_routes_of_warp(r, [&](int64_t, int expert, uint32_t lanes) {
    if (expert >= 0 && lane == __ffs(lanes) - 1) s_own[expert] += __popc(lanes);
    __syncwarp();
  });
  __syncthreads();
  const auto count_of = [&](int expert) {
    int count = 0;
    for (int w = 0; w < warps; ++w) count += s_rows[w * r.experts + expert];
    return count;
  };
  const auto divide_among_warps = [&](int expert, int row) {
    for (int w = 0; w < warps; ++w) {
      const int count = s_rows[w * r.experts + expert];
      s_rows[w * r.experts + expert] = row;
      row += count;
    }
  };
  if (g_first_rows == nullptr) {
    block_scan(r.experts, s_warps, count_of, [&](int expert, int count, int row) {
      r.ends[expert] = row + count;
      divide_among_warps(expert, row);
    });
  } else {
    const int* g_first = g_first_rows + int64_t(blockIdx.x) * r.experts;
    for (int e = threadIdx.x; e < r.experts; e += blockDim.x) divide_among_warps(e, g_first[e]);
  }
  __syncthreads();
  for_routes_of_warp(r, [&](int64_t route, int expert, uint32_t lanes) {
    const int row = expert < 0 ? -1 : s_own[expert] + __popc(lanes & ((1u << lane) - 1));
    __syncwarp();
    if (expert >= 0 && lane == __ffs(lanes) - 1) s_own[expert] += __popc(lanes);
    __syncwarp();
    if (route < r.tokens * r.k) {
      r.rows[route] = row;
      if (row >= 0) r.order[row] = static_cast<int>(route);
    }
  });
}

}  // namespace

void launch_expert_routes(const ExpertRoutes& r, int* counts, cudaStream_t stream) {
  const auto chunks = static_cast<int>(divide_up(r.count(), kRouteChunk));
  const int bytes = r.experts * static_cast<int>(sizeof(int));
  int warps = kMaxSortWarps;
  while (warps > 1 && warps * bytes > kDefaultSharedBytes) warps /= 2;
  if (chunks > 1) {
    launch_kernel(count_routes_kernel, overlapping(chunks, kMaxSortWarps * 32, bytes), stream, r,
                  counts);
    launch_kernel(scan_counts_kernel, overlapping(1, kScanThreads), stream, r, counts, chunks);
  }
  launch_kernel(place_routes_kernel, overlapping(chunks, warps * 32, warps * bytes), stream, r,
                chunks > 1 ? counts : nullptr);
  check_launch("experts");
}

}  // namespace torchweld
