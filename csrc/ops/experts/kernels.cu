// The kernels of a layer of experts around its grouped products (gemm/).
//
// The routes are sorted by counting, in three kernels: each block counts the experts of a chunk of
// routes; one block adds up the counts; each block gives the routes of its chunk their rows. A warp
// processes its routes in order, 32 at a time, and lanes with the same expert get their rows in
// the order of the lanes. No atomic operation decides an order, so the rows are the same in every
// run.
//
// In the other kernels a warp processes one row, or one token, in accesses of 16 bytes.
#include "ops/experts/experts.h"

#include "core/index.h"
#include "core/launch.h"
#include "device/access.cuh"
#include "device/activation.cuh"
#include "device/dispatch.cuh"
#include "device/reduce.cuh"
#include "device/scan.cuh"
#include "device/sm90/dependent_launch.cuh"

namespace torchweld {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kMaxSortWarps = 16, kScanThreads = 1024;
constexpr int kPartRows = 256;

// A lane of gather_kernel loads this many accesses of kElems elements before it stores them.
constexpr int kGatherAccesses = 4;
constexpr int gather_columns(int elems) { return kGatherAccesses * 32 * elems; }

// Returns the expert of a route, or -1.
__device__ __forceinline__ int expert_of(const ExpertRoutes& r, int64_t route) {
  if (route >= r.tokens * r.k) return -1;
  const int64_t id = r.index_is_int64 ? static_cast<const int64_t*>(r.index)[route]
                                      : static_cast<const int*>(r.index)[route];
  return id >= 0 && id < r.experts ? static_cast<int>(id) : -1;
}

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

// The number of rows of all experts.
__device__ __forceinline__ int64_t row_count(const ExpertRoutes& r) {
  return r.ends[r.experts - 1];
}

__device__ __forceinline__ int64_t warp_index() {
  return int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
}

template <typename T>
__device__ __forceinline__ float weight_of(const void* g_weight, bool fp32, int64_t route, T) {
  return fp32 ? static_cast<const float*>(g_weight)[route]
              : to_float(static_cast<const T*>(g_weight)[route]);
}

template <typename T>
__device__ __forceinline__ void store_weight(void* g_weight, bool fp32, int64_t route,
                                             float value) {
  if (fp32) {
    static_cast<float*>(g_weight)[route] = value;
  } else {
    static_cast<T*>(g_weight)[route] = from_float<T>(value);
  }
}

// Sets columns n to stride - 1 of a row to zero. There are fewer of them than lanes.
template <typename T>
__device__ __forceinline__ void clear_padding(T* g_row, const RouteRows& m) {
  const int64_t column = m.n + threadIdx.x % 32;
  if (column < m.stride) g_row[column] = from_float<T>(0.f);
}

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

// f(x) and its derivative.
template <ExpertActivation kActivation, bool kExact>
__device__ __forceinline__ ValueAndSlope activate_expert(float x, float slope) {
  switch (kActivation) {
    case ExpertActivation::kSilu: {
      const Sigmoids<kExact> s(slope * x);
      return {x * s.of_x, s.of_x * (1.f + slope * x * s.complement)};
    }
    case ExpertActivation::kGelu:
      return {gelu<kExact>(x), gelu_slope(x)};
    case ExpertActivation::kGeluTanh:
      return gelu_tanh_and_slope<kExact>(x);
    case ExpertActivation::kRelu:
      return {relu(x), x <= 0.f ? 0.f : 1.f};
    default:
      return {relu(x) * relu(x), 2.f * relu(x)};
  }
}

// The halves of z in columns [c, c + kElems) of act.
template <typename T, int kElems>
struct GateInputs {
  float g[kElems], u[kElems];

  __device__ __forceinline__ GateInputs(const T* g_z, int64_t c, int64_t n,
                                        const ExpertGate& gate) {
    if (gate.gated && gate.interleaved) {
      const auto low = load_vec<T, kElems>(g_z + 2 * c),
                 high = load_vec<T, kElems>(g_z + 2 * c + kElems);
#pragma unroll
      for (int i = 0; i < kElems; ++i) {
        const int at = 2 * i;
        g[i] = to_float(at < kElems ? low.values[at % kElems] : high.values[at % kElems]);
        u[i] = to_float(at + 1 < kElems ? low.values[(at + 1) % kElems]
                                        : high.values[(at + 1) % kElems]);
      }
      return;
    }
    const auto left = load_vec<T, kElems>(g_z + c);
#pragma unroll
    for (int i = 0; i < kElems; ++i) g[i] = to_float(left.values[i]);
    if (!gate.gated) return;
    const auto right = load_vec<T, kElems>(g_z + n + c);
#pragma unroll
    for (int i = 0; i < kElems; ++i) u[i] = to_float(right.values[i]);
  }

  // Stores g and u at the place from which they were loaded.
  __device__ __forceinline__ void store(T* g_z, int64_t c, int64_t n,
                                        const ExpertGate& gate) const {
    Vec<T, kElems> left, right;
    const bool pairs = gate.gated && gate.interleaved;
#pragma unroll
    for (int i = 0; i < kElems; ++i) {
      const float* from = i % 2 ? u : g;
      left.values[i] = from_float<T>(pairs ? from[i / 2] : g[i]);
      right.values[i] =
          from_float<T>(pairs ? (kElems == 1 ? u[0] : from[(kElems + i) / 2 % kElems]) : u[i]);
    }
    store_vec(g_z + (pairs ? 2 * c : c), left);
    if (gate.gated) store_vec(g_z + (pairs ? 2 * c + kElems : n + c), right);
  }
};

// The value of act, and its derivatives with respect to g and u.
template <ExpertActivation kActivation, bool kExact>
struct GateResult {
  float act, of_g, of_u;
  __device__ __forceinline__ GateResult(float g, float u, const ExpertGate& gate) {
    const auto limit = static_cast<float>(gate.limit), shift = static_cast<float>(gate.shift);
    const bool g_free = !(g > limit), u_free = !(fabsf(u) > limit);
    const ValueAndSlope f =
        activate_expert<kActivation, kExact>(g_free ? g : limit, static_cast<float>(gate.slope));
    const float factor = gate.gated ? (u_free ? u : copysignf(limit, u)) + shift : 1.f;
    act = f.value * factor;
    of_g = g_free ? f.slope * factor : 0.f;
    of_u = u_free ? f.value : 0.f;
  }
};

template <typename T, int kElems, ExpertActivation kActivation>
__global__ void __launch_bounds__(kThreads)
    gate_kernel(const RouteRows act, const RouteRows z, const ExpertGate gate,
                const __grid_constant__ ExpertRoutes r) {
  constexpr bool kExact = sizeof(T) == 4;
  const int64_t row = warp_index();
  griddep_launch_dependents();
  griddep_wait();
  if (row >= row_count(r)) return;
  const T* g_z = static_cast<const T*>(z.data) + row * z.stride;
  T* g_act = static_cast<T*>(act.data) + row * act.stride;
  for (int64_t c = threadIdx.x % 32 * kElems; c < act.n; c += 32 * kElems) {
    const GateInputs<T, kElems> in(g_z, c, act.n, gate);
    Vec<T, kElems> to;
#pragma unroll
    for (int i = 0; i < kElems; ++i) {
      const float u = gate.gated ? in.u[i] : 0.f;
      to.values[i] = from_float<T>(GateResult<kActivation, kExact>(in.g[i], u, gate).act);
    }
    store_vec(g_act + c, to);
  }
  clear_padding(g_act, act);
}

template <typename T, int kElems, ExpertActivation kActivation>
__global__ void __launch_bounds__(kThreads)
    gate_backward_kernel(const __grid_constant__ ExpertGateBackward p,
                         const __grid_constant__ ExpertRoutes r) {
  constexpr bool kExact = sizeof(T) == 4;
  const int64_t row = warp_index(), n = p.z.n / (p.gate.gated ? 2 : 1);
  const int lane = threadIdx.x % 32;
  griddep_launch_dependents();
  griddep_wait();
  if (row >= row_count(r)) return;
  const int64_t route = r.order[row];
  const float weight = weight_of(p.weight, p.weight_fp32, route, T());
  const T* g_z = static_cast<const T*>(p.z.data) + row * p.z.stride;
  const T* g_dact = static_cast<const T*>(p.dact.data) + row * p.dact.stride;
  T* g_dz = static_cast<T*>(p.dz.data) + row * p.dz.stride;
  T* g_act = static_cast<T*>(p.act.data) + row * p.act.stride;
  float dweight = 0.f;
  for (int64_t c = lane * kElems; c < n; c += 32 * kElems) {
    GateInputs<T, kElems> in(g_z, c, n, p.gate);
    Vec<T, kElems> dact = {}, to;
    if (p.dact.data != nullptr) dact = load_vec<T, kElems>(g_dact + c);
#pragma unroll
    for (int i = 0; i < kElems; ++i) {
      const float u = p.gate.gated ? in.u[i] : 0.f, d = to_float(dact.values[i]);
      const GateResult<kActivation, kExact> result(in.g[i], u, p.gate);
      dweight = fmaf(d, result.act, dweight);
      to.values[i] = from_float<T>(weight * result.act);
      in.g[i] = weight * d * result.of_g;
      in.u[i] = weight * d * result.of_u;
    }
    if (p.dz.data != nullptr) in.store(g_dz, c, n, p.gate);
    if (p.act.data != nullptr) store_vec(g_act + c, to);
  }
  if (p.dz.data != nullptr) clear_padding(g_dz, p.dz);
  if (p.act.data != nullptr) clear_padding(g_act, p.act);
  if (p.dweight == nullptr) return;
  if (p.down_bias != nullptr) {
    const T* g_dy = static_cast<const T*>(p.dy.data) + row * p.dy.stride;
    const T* g_bias = static_cast<const T*>(p.down_bias) + expert_of(r, route) * p.dy.n;
    for (int64_t c = lane; c < p.dy.n; c += 32) {
      dweight = fmaf(to_float(g_dy[c]), to_float(g_bias[c]), dweight);
    }
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) dweight += __shfl_xor_sync(~0u, dweight, step);
  if (lane == 0) store_weight<T>(p.dweight, p.weight_fp32, route, dweight);
}

// A thread adds up the parts of one row.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    sum_weight_gradients_kernel(void* g_dweight, bool weight_fp32, const float* g_parts, int count,
                                const __grid_constant__ ExpertRoutes r) {
  griddep_launch_dependents();
  griddep_wait();
  const int64_t row = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= row_count(r)) return;
  float sum = 0.f;
  for (int part = 0; part < count; ++part) sum += g_parts[part * (r.tokens * r.k) + row];
  store_weight<T>(g_dweight, weight_fp32, r.order[row], sum);
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
  int expert = 0, high = r.experts - 1;  // the part is of the last expert that starts at or before
  while (expert < high) {                // it
    const int middle = (expert + high + 1) / 2;
    if (first_part_of(r, middle) <= part) {
      expert = middle;
    } else {
      high = middle - 1;
    }
  }
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

int64_t blocks_of(int64_t warps) { return divide_up(warps, kWarps); }

template <typename Body>
void with_activation(ExpertActivation activation, const Body& body) {
  dispatch_index<5>(static_cast<int>(activation), [&](auto index) {
    body(std::integral_constant<ExpertActivation, static_cast<ExpertActivation>(index.value)>());
  });
}

MatrixRows accessed(const RouteRows& rows) { return {rows.data, rows.stride}; }

Grid overlapping(int64_t blocks, int threads, int shared_bytes = 0) {
  Grid grid(blocks, threads, shared_bytes);
  grid.overlaps = true;
  return grid;
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

void launch_expert_gate(const RouteRows& act, const RouteRows& z, const ExpertGate& gate,
                        const ExpertRoutes& r, DType dtype, cudaStream_t stream) {
  dispatch_access(dtype, act.n, {accessed(act), accessed(z)}, [&](auto element, auto elems) {
    using T = decltype(element);
    with_activation(gate.activation, [&](auto activation) {
      launch_kernel(gate_kernel<T, elems.value, activation.value>,
                    overlapping(blocks_of(r.count()), kThreads), stream, act, z, gate, r);
    });
  });
  check_launch("experts");
}

void launch_expert_gate_backward(const ExpertGateBackward& p, const ExpertRoutes& r, DType dtype,
                                 cudaStream_t stream) {
  const int64_t n = p.z.n / (p.gate.gated ? 2 : 1);
  dispatch_access(dtype, n, {accessed(p.z), accessed(p.dact), accessed(p.dz), accessed(p.act)},
                  [&](auto element, auto elems) {
                    using T = decltype(element);
                    with_activation(p.gate.activation, [&](auto activation) {
                      launch_kernel(gate_backward_kernel<T, elems.value, activation.value>,
                                    overlapping(blocks_of(r.count()), kThreads), stream, p, r);
                    });
                  });
  check_launch("experts");
}

void launch_sum_weight_gradients(void* dweight, bool weight_fp32, const float* parts, int count,
                                 const ExpertRoutes& r, DType dtype, cudaStream_t stream) {
  dispatch_dtype(dtype, [&](auto element) {
    launch_kernel(sum_weight_gradients_kernel<decltype(element)>,
                  overlapping(divide_up(r.count(), kThreads), kThreads), stream, dweight,
                  weight_fp32, parts, count, r);
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
