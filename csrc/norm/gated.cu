// Computes rms_norm_gated and its gradients.
//
//   dx = rstd * (g - rhat * mean(g * rhat)),  dgate = dy * rhat * scale * silu'(gate)
//   g = dy * scale * silu(gate),  rhat = x * rstd
// With gate_first, g = dy * scale and rhat = x * silu(gate) * rstd. The first formula is then the
// gradient with respect to r, and dx = dr * silu(gate), dgate = dr * x * silu'(gate).
//
// A tile of 16 to 512 threads holds a row, 16 bytes of each matrix in a thread, so that every lane
// works on the short rows of heads too. A tile processes several rows and prefetches the next ones
// into a ring of stages in shared memory. In backward it adds dscale up in registers, and another
// kernel adds up the sums of the blocks in a fixed order.
//
// The streaming kernels are for longer rows and for matrices that are not aligned. A block reads a
// row twice, for the sum over the row and for the results. The gradient of the scale is then a pass
// of its own over the columns.
#include "norm/gated.h"

#include "core/device.h"
#include "core/launch.h"
#include "device/activation.cuh"
#include "device/mma_sync.cuh"
#include "norm/norm_rows.cuh"
#include "pointwise/column_pass.cuh"

namespace torchweld {
namespace {

constexpr int kGatedThreads = 256;  // of a block of a streaming kernel
// The threads of an SM at once, with 64 and 80 registers each.
constexpr int kForwardThreads = 1024, kBackwardThreads = 768;
constexpr int kStages = 3;  // of the ring of rows

// The columns of x and of the gate in the registers of a thread, in fp32.
template <bool kExact, int kElems>
struct GatedColumns {
  float x[kElems], value[kElems], slope[kElems];  // value and slope are those of silu(gate)

  template <typename T>
  __device__ __forceinline__ GatedColumns(const Vec<T, kElems>& in, const Vec<T, kElems>& gate) {
#pragma unroll
    for (int j = 0; j < kElems; ++j) {
      const float z = to_float(gate.values[j]);
      const Sigmoids<kExact> s(z);
      x[j] = to_float(in.values[j]);
      value[j] = z * s.of_x;
      slope[j] = s.of_x * (1.f + z * s.complement);
    }
  }

  // The value that is normalised.
  template <bool kFirst>
  __device__ __forceinline__ float r(int j) const {
    return kFirst ? x[j] * value[j] : x[j];
  }
};

// Loads values of the scale as fp32. It has the dtype T, or fp32.
template <typename T, int kElems>
__device__ __forceinline__ void load_any_scale(float (&r_to)[kElems], const void* g_scale,
                                               DType dtype, int64_t column) {
  if (sizeof(T) == 4 || dtype == DType::kFloat32) {
    load_scale<float>(r_to, g_scale, column, 0.f);
  } else {
    load_scale<T>(r_to, g_scale, column, 0.f);
  }
}

constexpr int tile_threads(int lanes) { return lanes <= kWarp ? 4 * kWarp : lanes; }

// Returns the number of blocks per SM for about `threads` threads, at least 2.
constexpr int resident_blocks(int lanes, int threads) {
  const int blocks = threads / tile_threads(lanes);
  return blocks > 1 ? blocks : 2;
}

// Sums a value over the threads that hold a row. A loop must alternate between two objects.
template <int kLanes>
struct TileSum {
  BlockExchange<kLanes <= kWarp ? kWarp : kLanes> s_exchange;

  __device__ __forceinline__ float operator()(float x) {
#pragma unroll
    for (int step = (kLanes < kWarp ? kLanes : kWarp) / 2; step > 0; step /= 2) {
      x += __shfl_xor_sync(~0u, x, step);
    }
    if constexpr (kLanes > kWarp) x = s_exchange.sum_warps(x);
    return x;
  }
};

// A thread's part of a ring of stages in shared memory, into which cp.async prefetches the columns
// of kInputs matrices. A thread reads only what it has copied itself, so the ring needs no barrier.
template <typename T, int kLanes, int kInputs>
struct Ring {
  static constexpr int kElems = kVectorBytes / sizeof(T), kThreads = tile_threads(kLanes);
  static constexpr int kBytes = kStages * kInputs * kVectorBytes * kThreads;
  uint4* s_first;  // the first slot of the thread
  int64_t rows;    // or 0 if the columns of the thread do not exist
  int stage = 0;

  __device__ __forceinline__ Ring(uint4* s_ring, int64_t rows)
      : s_first(s_ring + threadIdx.x), rows(rows) {}

  __device__ __forceinline__ uint4* slot(int stage, int input) const {
    return s_first + (stage * kInputs + input) * kThreads;
  }
  // Starts the copies of a row. from(input, row) is the address of the thread's columns.
  template <typename From>
  __device__ __forceinline__ void fetch(int64_t row, int stage, const From& from) const {
    if (row < rows) {
#pragma unroll
      for (int i = 0; i < kInputs; ++i) {
        copy_async_16(shared_address(slot(stage, i)), from(i, row), kVectorBytes);
      }
    }
    copy_async_commit();
  }
  template <typename From>
  __device__ __forceinline__ void fill(int64_t row, int64_t step, const From& from) const {
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) fetch(row + i * step, i, from);
  }
  // Waits for the oldest row, and reuses the stage that the thread has read before it.
  template <typename From>
  __device__ __forceinline__ void advance(int64_t row, int64_t step, const From& from) {
    copy_async_wait<kStages - 2>();
    fetch(row + (kStages - 1) * step, (stage + kStages - 1) % kStages, from);
  }
  __device__ __forceinline__ void release() { stage = (stage + 1) % kStages; }
  __device__ __forceinline__ Vec<T, kElems> read(int input) const {
    return *reinterpret_cast<const Vec<T, kElems>*>(slot(stage, input));
  }
};

template <typename T, int kLanes, bool kFirst>
__global__ void __launch_bounds__(tile_threads(kLanes), resident_blocks(kLanes, kForwardThreads))
    norm_gated_kernel(const __grid_constant__ NormGatedParams p) {
  using RowRing = Ring<T, kLanes, 2>;
  constexpr int kElems = RowRing::kElems, kRows = RowRing::kThreads / kLanes;
  extern __shared__ uint4 s_ring[];
  __shared__ TileSum<kLanes> s_sum[2];
  const int group = threadIdx.x / kLanes;
  const int64_t column = threadIdx.x % kLanes * kElems, step = int64_t(gridDim.x) * kRows;
  const auto from = [&](int input, int64_t row) {
    return input == 0 ? static_cast<const T*>(p.x) + row * p.x_row_stride + column
                      : static_cast<const T*>(p.gate) + row * p.gate_row_stride + column;
  };
  RowRing ring(s_ring, column < p.n ? p.rows : 0);
  float scale[kElems] = {};
  if (column < p.n) load_any_scale<T>(scale, p.scale, p.vector_dtype, column);
  int64_t row = int64_t(blockIdx.x) * kRows + group;
  ring.fill(row, step, from);
  int exchange = 0;
  // Every thread of a block joins every sum, even if its row does not exist.
  for (; row - group < p.rows; row += step) {
    ring.advance(row, step, from);
    const bool live = row < ring.rows;
    const GatedColumns<sizeof(T) == 4, kElems> in(ring.read(0), ring.read(1));
    float sum = 0.f;
    if (live) {
#pragma unroll
      for (int j = 0; j < kElems; ++j) sum += in.template r<kFirst>(j) * in.template r<kFirst>(j);
    }
    const float rstd = 1.f / sqrtf(s_sum[exchange](sum) / static_cast<float>(p.n) + p.eps);
    if (live) {
      if (p.rstd != nullptr && column == 0) p.rstd[row] = rstd;
      Vec<T, kElems> y;
#pragma unroll
      for (int j = 0; j < kElems; ++j) {
        const float normed = in.template r<kFirst>(j) * rstd * scale[j];
        y.values[j] = from_float<T>(kFirst ? normed : normed * in.value[j]);
      }
      store_vec(static_cast<T*>(p.y) + row * p.n + column, y);
    }
    ring.release();
    exchange ^= 1;
  }
}

// A thread's columns of one row.
template <typename T, int kElems>
struct BackwardRow {
  Vec<T, kElems> dy, x, gate;

  BackwardRow() = default;
  __device__ __forceinline__ BackwardRow(const NormGatedBackwardParams& p, int64_t row,
                                         int64_t column)
      : dy(load_vec<T, kElems>(static_cast<const T*>(p.dy) + row * p.dy_row_stride + column)),
        x(load_vec<T, kElems>(static_cast<const T*>(p.x) + row * p.x_row_stride + column)),
        gate(load_vec<T, kElems>(static_cast<const T*>(p.gate) + row * p.gate_row_stride +
                                 column)) {}
};

template <typename T, int kLanes, bool kFirst>
__global__ void __launch_bounds__(tile_threads(kLanes), resident_blocks(kLanes, kBackwardThreads))
    norm_gated_backward_kernel(const __grid_constant__ NormGatedBackwardParams p) {
  using RowRing = Ring<T, kLanes, 3>;
  constexpr int kElems = RowRing::kElems, kRows = RowRing::kThreads / kLanes;
  extern __shared__ uint4 s_ring[];
  __shared__ TileSum<kLanes> s_sum[2];
  const int group = threadIdx.x / kLanes;
  const int64_t column = threadIdx.x % kLanes * kElems, step = int64_t(gridDim.x) * kRows;
  const auto from = [&](int input, int64_t row) {
    return input == 0   ? static_cast<const T*>(p.dy) + row * p.dy_row_stride + column
           : input == 1 ? static_cast<const T*>(p.x) + row * p.x_row_stride + column
                        : static_cast<const T*>(p.gate) + row * p.gate_row_stride + column;
  };
  RowRing ring(s_ring, column < p.n ? p.rows : 0);
  float scale[kElems] = {};
  if (column < p.n) load_any_scale<T>(scale, p.scale, p.vector_dtype, column);
  ColumnSumOf<T> sums[kElems] = {};
  int64_t row = int64_t(blockIdx.x) * kRows + group;
  ring.fill(row, step, from);
  float next_rstd = row < p.rows ? p.rstd[row] : 0.f;
  int exchange = 0;
  // Every thread of a block joins every sum, even if its row does not exist.
  for (; row - group < p.rows; row += step) {
    const float rstd = next_rstd;
    next_rstd = row + step < p.rows ? p.rstd[row + step] : 0.f;
    ring.advance(row, step, from);
    const bool live = row < ring.rows;
    const GatedColumns<sizeof(T) == 4, kElems> in(ring.read(1), ring.read(2));
    float sum = 0.f;
    if (live) {
      const auto dy = ring.read(0);
#pragma unroll
      for (int j = 0; j < kElems; ++j) {
        const float grad = to_float(dy.values[j]), rhat = in.template r<kFirst>(j) * rstd;
        const float normed = (kFirst ? grad : grad * in.value[j]) * rhat;
        sum += normed * scale[j];
        sums[j] += normed;
      }
    }
    const float mean = s_sum[exchange](sum) / static_cast<float>(p.n);
    if (live) {
      const auto dy = ring.read(0), x = ring.read(1);
      Vec<T, kElems> dx, dgate;
#pragma unroll
      for (int j = 0; j < kElems; ++j) {
        const float grad = to_float(dy.values[j]) * scale[j], x_j = to_float(x.values[j]);
        const float rhat = (kFirst ? x_j * in.value[j] : x_j) * rstd;
        const float dr = rstd * ((kFirst ? grad : grad * in.value[j]) - rhat * mean);
        dx.values[j] = from_float<T>(kFirst ? dr * in.value[j] : dr);
        dgate.values[j] = from_float<T>((kFirst ? dr * x_j : grad * rhat) * in.slope[j]);
      }
      if (p.dx != nullptr) store_vec(static_cast<T*>(p.dx) + row * p.n + column, dx);
      if (p.dgate != nullptr) store_vec(static_cast<T*>(p.dgate) + row * p.n + column, dgate);
    }
    ring.release();
    exchange ^= 1;
  }
  if (p.partials == nullptr) return;
  float r_sums[kElems];
#pragma unroll
  for (int j = 0; j < kElems; ++j) r_sums[j] = sums[j].value();
  if constexpr (kRows > 1) {
    __shared__ float s_sums[kRows][kLanes * kElems];
#pragma unroll
    for (int j = 0; j < kElems; ++j) s_sums[group][column + j] = r_sums[j];
    __syncthreads();
    if (group > 0) return;
#pragma unroll
    for (int other = 1; other < kRows; ++other) {
#pragma unroll
      for (int j = 0; j < kElems; ++j) r_sums[j] += s_sums[other][column + j];
    }
  }
  if (column >= p.n) return;
#pragma unroll
  for (int j = 0; j < kElems; ++j) p.partials[blockIdx.x * p.n + column + j] = r_sums[j];
}

template <typename T, int kElems, bool kFirst>
__global__ void __launch_bounds__(kGatedThreads)
    norm_gated_stream_kernel(const __grid_constant__ NormGatedParams p, int64_t first_row) {
  using Columns = GatedColumns<sizeof(T) == 4, kElems>;
  __shared__ TileSum<kGatedThreads> s_sum;
  const int64_t row = first_row + blockIdx.x;
  const T* g_x = static_cast<const T*>(p.x) + row * p.x_row_stride;
  const T* g_gate = static_cast<const T*>(p.gate) + row * p.gate_row_stride;
  T* g_y = static_cast<T*>(p.y) + row * p.n;
  const auto load = [&](int64_t c) {
    return Columns(load_vec<T, kElems>(g_x + c), load_vec<T, kElems>(g_gate + c));
  };
  constexpr int kStep = kGatedThreads * kElems;
  const int64_t start = threadIdx.x * kElems;
  float sum = 0.f;
  for (int64_t c = start; c < p.n; c += kStep) {
    const Columns in = load(c);
#pragma unroll
    for (int j = 0; j < kElems; ++j) sum += in.template r<kFirst>(j) * in.template r<kFirst>(j);
  }
  const float rstd = 1.f / sqrtf(s_sum(sum) / static_cast<float>(p.n) + p.eps);
  if (p.rstd != nullptr && start == 0) p.rstd[row] = rstd;
  for (int64_t c = start; c < p.n; c += kStep) {
    const Columns in = load(c);
    float scale[kElems];
    load_any_scale<T>(scale, p.scale, p.vector_dtype, c);
    Vec<T, kElems> y;
#pragma unroll
    for (int j = 0; j < kElems; ++j) {
      const float normed = in.template r<kFirst>(j) * rstd * scale[j];
      y.values[j] = from_float<T>(kFirst ? normed : normed * in.value[j]);
    }
    store_vec(g_y + c, y);
  }
}

template <typename T, int kElems, bool kFirst>
__global__ void __launch_bounds__(kGatedThreads)
    norm_gated_backward_stream_kernel(const __grid_constant__ NormGatedBackwardParams p,
                                      int64_t first_row) {
  __shared__ TileSum<kGatedThreads> s_sum;
  const int64_t row = first_row + blockIdx.x;
  const float rstd = p.rstd[row];

  // For columns from c on: calls body(j, in, dy * scale, r).
  const auto for_columns = [&](int64_t c, const auto& body) {
    const BackwardRow<T, kElems> at(p, row, c);
    const GatedColumns<sizeof(T) == 4, kElems> in(at.x, at.gate);
    float scale[kElems];
    load_any_scale<T>(scale, p.scale, p.vector_dtype, c);
#pragma unroll
    for (int j = 0; j < kElems; ++j) {
      body(j, in, to_float(at.dy.values[j]) * scale[j], in.template r<kFirst>(j));
    }
  };

  constexpr int kStep = kGatedThreads * kElems;
  const int64_t start = threadIdx.x * kElems;
  float sum = 0.f;
  for (int64_t c = start; c < p.n; c += kStep) {
    for_columns(c, [&](int j, const auto& in, float grad, float r) {
      sum += (kFirst ? grad : grad * in.value[j]) * (r * rstd);
    });
  }
  const float mean = s_sum(sum) / static_cast<float>(p.n);
  for (int64_t c = start; c < p.n; c += kStep) {
    Vec<T, kElems> dx, dgate;
    for_columns(c, [&](int j, const auto& in, float grad, float r) {
      const float rhat = r * rstd, g = kFirst ? grad : grad * in.value[j];
      const float dr = rstd * (g - rhat * mean);
      dx.values[j] = from_float<T>(kFirst ? dr * in.value[j] : dr);
      dgate.values[j] = from_float<T>((kFirst ? dr * in.x[j] : grad * rhat) * in.slope[j]);
    });
    if (p.dx != nullptr) store_vec(static_cast<T*>(p.dx) + row * p.n + c, dx);
    if (p.dgate != nullptr) store_vec(static_cast<T*>(p.dgate) + row * p.n + c, dgate);
  }
}

// Sums dscale = dy * x * silu(gate) * rstd over the rows, whichever comes first.
template <typename T, int kElems_>
struct ScaleGradientOp {
  static constexpr int kElems = kElems_, kSums = 1;
  static constexpr bool kWrites = false;
  using Sum = ColumnSumOf<T>;
  struct Loaded {
    BackwardRow<T, kElems> at;
    float rstd;
  };
  NormGatedBackwardParams p;

  __device__ __forceinline__ Loaded load(int64_t row, int64_t column) const {
    return {{p, row, column}, p.rstd[row]};
  }

  __device__ __forceinline__ void add(int64_t, int64_t, const Loaded& of,
                                      Sum (&sums)[1][kElems]) const {
    const GatedColumns<sizeof(T) == 4, kElems> in(of.at.x, of.at.gate);
#pragma unroll
    for (int j = 0; j < kElems; ++j) {
      sums[0][j] += to_float(of.at.dy.values[j]) * (in.x[j] * in.value[j] * of.rstd);
    }
  }
};

// The number of threads that hold a row in accesses of `elems` values, or 0 if no tile does.
int lanes_of(int64_t n, int elems) {
  if (elems == 1) return 0;
  for (int lanes = kWarp / 2; lanes <= 16 * kWarp; lanes *= 2) {
    if (n <= lanes * elems) return lanes;
  }
  return 0;
}

// Calls body(first, lanes) with compile-time constants.
template <typename Body>
void dispatch_tile(bool gate_first, int lanes, const Body& body) {
  dispatch_index<6>(__builtin_ctz(lanes) - 4, [&](auto i) {
    const std::integral_constant<int, (kWarp / 2) << i.value> tile;
    gate_first ? body(std::true_type(), tile) : body(std::false_type(), tile);
  });
}

template <typename Body>
void dispatch_backward(const NormGatedBackwardParams& p, const Body& body) {
  dispatch_access(p.dtype, p.n,
                  {{p.dy, p.dy_row_stride},
                   {p.x, p.x_row_stride},
                   {p.gate, p.gate_row_stride},
                   {p.dx, p.n},
                   {p.dgate, p.n},
                   {p.scale, 0}},
                  [&](auto element, auto elems) { body(element, elems, lanes_of(p.n, elems)); });
}

// The blocks of a kernel on tiles that has `threads` threads of an SM at once. A tile processes at
// least `least` rows.
int64_t tile_blocks(int64_t rows, int lanes, int threads, int64_t least) {
  const int64_t wanted = divide_up(rows, least * tile_threads(lanes) / lanes);
  return std::min(wanted, int64_t{resident_blocks(lanes, threads)} * device_facts().sms);
}

// With fewer rows in a tile, the sums of more blocks would cost more than their threads gain.
int64_t backward_blocks(int64_t rows, int lanes) {
  return tile_blocks(rows, lanes, kBackwardThreads, 4);
}

}  // namespace

void launch_norm_gated(const NormGatedParams& p, cudaStream_t stream) {
  dispatch_access(
      p.dtype, p.n, {{p.x, p.x_row_stride}, {p.gate, p.gate_row_stride}, {p.y, p.n}, {p.scale, 0}},
      [&](auto element, auto elems) {
        using T = decltype(element);
        if (const int lanes = lanes_of(p.n, elems); lanes > 0) {
          const int64_t blocks = tile_blocks(p.rows, lanes, kForwardThreads, 1);
          return dispatch_tile(p.gate_first, lanes, [&](auto first, auto tile) {
            launch_kernel(norm_gated_kernel<T, tile.value, first.value>,
                          {blocks, unsigned(tile_threads(tile)), Ring<T, tile.value, 2>::kBytes},
                          stream, p);
          });
        }
        for_each_grid_of_rows(p.rows, 1, [&](int64_t row, int64_t n) {
          launch_kernel(p.gate_first ? norm_gated_stream_kernel<T, elems.value, true>
                                     : norm_gated_stream_kernel<T, elems.value, false>,
                        {n, kGatedThreads}, stream, p, row);
        });
      });
  check_launch("rms_norm_gated");
}

int64_t norm_gated_partials(const NormGatedBackwardParams& p) {
  int64_t partials = 0;
  dispatch_backward(p, [&](auto, auto, int lanes) {
    partials = lanes > 0 ? backward_blocks(p.rows, lanes) * p.n : column_partials(p.rows, p.n);
  });
  return partials;
}

void launch_norm_gated_backward(const NormGatedBackwardParams& p, cudaStream_t stream) {
  dispatch_backward(p, [&](auto element, auto elems, int lanes) {
    using T = decltype(element);
    const int64_t blocks = lanes > 0 ? backward_blocks(p.rows, lanes) : 0;
    if (lanes > 0) {
      dispatch_tile(p.gate_first, lanes, [&](auto first, auto tile) {
        launch_kernel(norm_gated_backward_kernel<T, tile.value, first.value>,
                      {blocks, unsigned(tile_threads(tile)), Ring<T, tile.value, 3>::kBytes},
                      stream, p);
      });
    } else if (p.dx != nullptr || p.dgate != nullptr) {
      for_each_grid_of_rows(p.rows, 1, [&](int64_t row, int64_t n) {
        launch_kernel(p.gate_first ? norm_gated_backward_stream_kernel<T, elems.value, true>
                                   : norm_gated_backward_stream_kernel<T, elems.value, false>,
                      {n, kGatedThreads}, stream, p, row);
      });
    }
    if (p.dscale == nullptr) return;
    dispatch_vectors<T>(p.vector_dtype, [&](auto vector) {
      using V = decltype(vector);
      const ColumnSums sums = {{p.dscale, nullptr}, 1};
      if (lanes > 0) {
        launch_add_partials<V>(p.partials, blocks, 1, p.n, sums, stream);
      } else {
        launch_column_pass<V>(ScaleGradientOp<T, elems.value>{p}, p.rows, p.n, p.partials, sums,
                              stream);
      }
    });
  });
  check_launch("rms_norm_gated_backward");
}

}  // namespace torchweld
