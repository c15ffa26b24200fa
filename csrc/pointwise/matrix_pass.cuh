// The kernels of one pass over a (rows, n) matrix (matrix_pass.h): cells computed from up to two
// matrices, a value a row and a value a column; written, or summed along rows and columns, or both.
//
// A thread keeps its columns while it goes down the rows of its block, so that values and sums of
// columns stay in registers. All its accesses of a batch of rows are in flight together, 16 bytes
// each, also where rows start anywhere: a block's rows have the same distance from the boundary.
// Sums of rows join in a warp, sums of columns in the block; the parts of different blocks are
// added in a fixed order by a second kernel, so that the sums have the same bits in every run.
#pragma once

#include <type_traits>

#include "core/launch.h"
#include "device/dispatch.cuh"
#include "device/reduce.cuh"
#include "pointwise/column_pass.cuh"
#include "pointwise/matrix_pass.h"

namespace torchweld {

template <typename T_, int kTile>
struct MatrixConfig {
  using T = T_;
  static constexpr MatrixTile kShape = kMatrixTiles[kTile];
  static constexpr int kLanes = kShape.lanes;
  static constexpr int kVectors = kShape.vectors;
  static constexpr int kElems = kShape.elems(sizeof(T));
  static constexpr int kWidth = kShape.width(sizeof(T));
  static_assert(kWarp % kLanes == 0 && kMatrixThreads % kLanes == 0);
};

template <typename T>
struct MatrixArgs {
  const T* g_in[2];
  int64_t in_row_stride[2];
  const T* g_x;
  const T* g_y;
  T* g_out;
  T* g_row_sums;
  T* g_column_sums;
  float* g_row_parts;     // (rows, row_parts), nullptr where a block has whole sums
  float* g_column_parts;  // (column_parts, n), the same
  MatrixPlan plan;
};

// The rows of a block: first + step * k for k in [begin, end).
struct BlockRows {
  int64_t first, step, begin, end;
  __device__ __forceinline__ int64_t row(int64_t k) const { return first + step * k; }
};

// A tile's columns: column + i for i in [begin, end) exist.
struct TileColumns {
  int64_t column;
  int begin, end;

  __device__ __forceinline__ bool holds(int i) const { return i >= begin && i < end; }
};

// kWhole: every column of the tile exists.
template <bool kWhole, typename T, int kElems>
__device__ __forceinline__ Vec<T, kElems> load_cells(const T* g_tile, int i,
                                                     const TileColumns& columns) {
  if (kWhole || (columns.holds(i) && columns.holds(i + kElems - 1))) {
    return load_vec<T, kElems>(g_tile + i);
  }
  Vec<T, kElems> cells = {};
#pragma unroll
  for (int j = 0; j < kElems; ++j) {
    if (columns.holds(i + j)) cells.values[j] = g_tile[i + j];
  }
  return cells;
}

template <bool kWhole, typename T, int kElems>
__device__ __forceinline__ void store_cells(T* g_tile, int i, const TileColumns& columns,
                                            const Vec<T, kElems>& cells) {
  if (kWhole || (columns.holds(i) && columns.holds(i + kElems - 1))) {
    store_vec(g_tile + i, cells);
  } else {
#pragma unroll
    for (int j = 0; j < kElems; ++j) {
      if (columns.holds(i + j)) g_tile[i + j] = cells.values[j];
    }
  }
}

// A thread's share of a tile: access v starts at column place(v) of the tile.
template <typename Config, typename F>
struct MatrixShare {
  using T = typename Config::T;
  static constexpr int kElems = Config::kElems;
  static constexpr int kVectors = Config::kVectors;
  static constexpr int kReads = F::kReads;
  static constexpr int kRows = Config::kShape.batch(kReads, F::kColumnSums);
  using Access = Vec<T, kElems>;

  const MatrixArgs<T>& args;
  const F& f;
  unsigned strip;
  int lane, group, groups;
  float r_row_sums[kRows] = {};
  ColumnSumOf<T> r_column_sums[kVectors][kElems] = {};

  __device__ __forceinline__ MatrixShare(const MatrixArgs<T>& args, const F& f, unsigned strip)
      : args(args),
        f(f),
        strip(strip),
        lane(threadIdx.x % Config::kLanes),
        group(threadIdx.x / Config::kLanes),
        groups(blockDim.x / Config::kLanes) {}

  __device__ __forceinline__ int place(int v) const { return (v * Config::kLanes + lane) * kElems; }

  // The values of the thread's columns, 0 where there is none.
  template <bool kWhole>
  __device__ __forceinline__ void load_columns(float (&r_x)[kVectors][kElems],
                                               const TileColumns& columns) const {
    const T* g_x = args.g_x + columns.column;
    const bool aligned = reinterpret_cast<uintptr_t>(g_x) % sizeof(Access) == 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      Access x = {};
      if (kWhole && aligned) {
        x = load_vec<T, kElems>(g_x + place(v));
      } else {
#pragma unroll
        for (int j = 0; j < kElems; ++j) {
          const int i = place(v) + j;
          if (kWhole || columns.holds(i)) x.values[j] = g_x[i];
        }
      }
#pragma unroll
      for (int j = 0; j < kElems; ++j) r_x[v][j] = to_float(x.values[j]);
    }
  }

  // Batch after batch of the block's rows in one tile.
  __device__ __forceinline__ void run(const BlockRows& rows, const TileColumns& columns) {
    const bool whole = columns.begin == 0 && columns.end == Config::kWidth;
    float r_x[kVectors][kElems] = {};
    if constexpr (F::kColumnValues) {
      whole ? load_columns<true>(r_x, columns) : load_columns<false>(r_x, columns);
    }
    const int batch = groups * kRows;
    for (int64_t base = rows.begin; base < rows.end; base += batch) {
      if (whole && base + batch <= rows.end) {
        run_batch<true>(rows, base, columns, r_x);
      } else {
        run_batch<false>(rows, base, columns, r_x);
      }
      if (F::kRowSums && args.plan.tiles_per_strip == 1) leave_row_sums(rows, base);
    }
  }

  // kWhole: every cell of the batch exists. Elsewhere a row is done before the next is loaded, for
  // the sake of registers.
  template <bool kWhole>
  __device__ __forceinline__ void run_batch(const BlockRows& rows, int64_t base,
                                            const TileColumns& columns,
                                            const float (&r_x)[kVectors][kElems]) {
    if constexpr (kWhole) {
      RowCells r_cells[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        r_cells[r] = load_row<kWhole>(rows.row(base + r * groups + group), columns);
      }
      // A batch's rows are added before they join the compensated sums, which cost six operations.
      float r_batch[kVectors][kElems] = {};
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int64_t row = rows.row(base + r * groups + group);
        r_row_sums[r] += compute_row<kWhole>(row, columns, r_cells[r], r_x, r_batch);
      }
      join_columns(r_batch);
    } else {
#pragma unroll 1
      for (int r = 0; r < kRows; ++r) {
        const int64_t k = base + r * groups + group;
        if (k >= rows.end) break;
        const RowCells r_cells = load_row<kWhole>(rows.row(k), columns);
        float r_batch[kVectors][kElems] = {};
        const float sum = compute_row<kWhole>(rows.row(k), columns, r_cells, r_x, r_batch);
        join_columns(r_batch);
#pragma unroll
        for (int q = 0; q < kRows; ++q) r_row_sums[q] += q == r ? sum : 0.f;
      }
    }
  }

  // What a thread loads of a row.
  struct RowCells {
    Access in[kReads > 0 ? kReads : 1][kVectors];
    float y;
  };

  template <bool kWhole>
  __device__ __forceinline__ RowCells load_row(int64_t row, const TileColumns& columns) const {
    RowCells cells;
    cells.y = F::kRowValues ? to_float(args.g_y[row]) : 0.f;
    if constexpr (kReads > 0) {
#pragma unroll
      for (int i = 0; i < kReads; ++i) {
        const T* g_tile = args.g_in[i] + row * args.in_row_stride[i] + columns.column;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          cells.in[i][v] = load_cells<kWhole, T, kElems>(g_tile, place(v), columns);
        }
      }
    }
    return cells;
  }

  __device__ __forceinline__ void join_columns(const float (&r_batch)[kVectors][kElems]) {
    if constexpr (F::kColumnSums) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int j = 0; j < kElems; ++j) r_column_sums[v][j] += r_batch[v][j];
      }
    }
  }

  // Returns what the thread's cells add to the row's sum; what they add to sums of columns goes to
  // r_batch.
  template <bool kWhole>
  __device__ __forceinline__ float compute_row(int64_t row, const TileColumns& columns,
                                               const RowCells& r_cells,
                                               const float (&r_x)[kVectors][kElems],
                                               float (&r_batch)[kVectors][kElems]) {
    float sums[kVectors] = {};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      Access out;
#pragma unroll
      for (int j = 0; j < kElems; ++j) {
        Cell<float> cell;
        if constexpr (kReads > 0) cell.in[0] = to_float(r_cells.in[0][v].values[j]);
        if constexpr (kReads > 1) cell.in[1] = to_float(r_cells.in[1][v].values[j]);
        cell.x = r_x[v][j];
        cell.y = r_cells.y;
        f(cell);
        if constexpr (F::kRowSums) sums[v] += cell.to_row;
        if constexpr (F::kColumnSums) r_batch[v][j] += cell.to_column;
        if constexpr (F::kWrites) out.values[j] = from_float<T>(cell.out);
      }
      if constexpr (F::kWrites) {
        T* const g_tile = args.g_out + row * args.plan.n + columns.column;
        store_cells<kWhole>(g_tile, place(v), columns, out);
      }
    }
    float sum = sums[0];
#pragma unroll
    for (int v = 1; v < kVectors; ++v) sum += sums[v];
    return sum;
  }

  // Joins the lanes of the batch's rows; the sums start again from 0.
  __device__ __forceinline__ void leave_row_sums(const BlockRows& rows, int64_t base) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float sum = r_row_sums[r];
      r_row_sums[r] = 0.f;
#pragma unroll
      for (int step = Config::kLanes / 2; step > 0; step /= 2) {
        sum += __shfl_xor_sync(~0u, sum, step);
      }
      const int64_t k = base + r * groups + group;
      if (lane != 0 || k >= rows.end) continue;
      const int64_t row = rows.row(k);
      if (args.g_row_parts != nullptr) {
        args.g_row_parts[row * args.plan.strips + strip] = sum;
      } else {
        args.g_row_sums[row] = from_float<T>(sum);
      }
    }
  }

  // Joins the groups of the block; the sums start again from 0. All threads of the block call it.
  __device__ __forceinline__ void leave_column_sums(const TileColumns& columns, int64_t part) {
    constexpr int kStep = Config::kLanes * kElems;
    __shared__ float s_sums[kMatrixThreads * kElems];  // (groups, kStep)
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      __syncthreads();
#pragma unroll
      for (int j = 0; j < kElems; ++j) {
        s_sums[group * kStep + lane * kElems + j] = r_column_sums[v][j].value();
        r_column_sums[v][j] = {};
      }
      __syncthreads();
      for (int i = threadIdx.x; i < kStep; i += blockDim.x) {
        const int at = v * kStep + i;
        if (!columns.holds(at)) continue;
        float sum = 0.f;
        for (int g = 0; g < groups; ++g) sum += s_sums[g * kStep + i];
        const int64_t column = columns.column + at;
        if (args.g_column_parts != nullptr) {
          args.g_column_parts[part * args.plan.n + column] = sum;
        } else {
          args.g_column_sums[column] = from_float<T>(sum);
        }
      }
    }
  }
};

template <typename Config, typename F>
__global__ __launch_bounds__(kMatrixThreads, 2) void matrix_pass_kernel(
    const __grid_constant__ MatrixArgs<typename Config::T> args, const F f) {
  const MatrixPlan& plan = args.plan;
  const unsigned strip = blockIdx.x % static_cast<unsigned>(plan.strips);
  const unsigned part = blockIdx.x / static_cast<unsigned>(plan.strips);  // (chunk, phase)
  const int phase = static_cast<int>(part % plan.phases);
  const int shift = (plan.shift + phase * plan.shift_step) % Config::kElems;
  const int64_t phase_rows = (plan.rows - phase + plan.phases - 1) / plan.phases;
  BlockRows rows = {phase, plan.phases, part / plan.phases * plan.rows_per_chunk, 0};
  rows.end = min(rows.begin + plan.rows_per_chunk, phase_rows);

  MatrixShare<Config, F> share(args, f, strip);
  const int64_t first = strip * plan.tiles_per_strip;
  const int64_t last = min(first + plan.tiles_per_strip, plan.tiles);
  for (int64_t tile = first; tile < last; ++tile) {
    const int64_t column = tile * Config::kWidth - shift;
    const int64_t left = plan.n - column;
    const TileColumns columns = {column, column < 0 ? shift : 0,
                                 static_cast<int>(left < Config::kWidth ? left : Config::kWidth)};
    share.run(rows, columns);
    if constexpr (F::kColumnSums) share.leave_column_sums(columns, part);
  }
  if (F::kRowSums && plan.tiles_per_strip > 1) share.leave_row_sums(rows, rows.begin);
}

// The sum of a row's parts: a warp a row, or a block where there are many.
template <typename T, int kThreadsPerRow>
__global__ __launch_bounds__(kMatrixThreads) void add_row_parts_kernel(const float* g_parts,
                                                                       int64_t rows, int64_t parts,
                                                                       T* g_sums) {
  constexpr int kRows = kMatrixThreads / kThreadsPerRow;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / kThreadsPerRow;
  if (kRows > 1 && row >= rows) return;
  const int thread = threadIdx.x % kThreadsPerRow;
  ColumnSumOf<T> part = {};
#pragma unroll 8
  for (int64_t i = thread; i < parts; i += kThreadsPerRow) part += g_parts[row * parts + i];
  float sum = warp_sum(part.value());
  if constexpr (kThreadsPerRow > kWarp) {
    __shared__ BlockExchange<kThreadsPerRow> s_exchange;
    sum = s_exchange.sum_warps(sum);
  }
  if (thread == 0) g_sums[row] = from_float<T>(sum);
}

template <typename T>
void launch_add_row_parts(const MatrixArgs<T>& args, cudaStream_t stream) {
  constexpr int64_t kManyParts = 512;
  const int64_t rows = args.plan.rows, parts = args.plan.row_parts();
  if (parts <= kManyParts) {
    constexpr int kRows = kMatrixThreads / kWarp;
    add_row_parts_kernel<T, kWarp>
        <<<static_cast<unsigned>(divide_up(rows, kRows)), kMatrixThreads, 0, stream>>>(
            args.g_row_parts, rows, parts, args.g_row_sums);
  } else {
    add_row_parts_kernel<T, kMatrixThreads>
        <<<static_cast<unsigned>(rows), kMatrixThreads, 0, stream>>>(args.g_row_parts, rows, parts,
                                                                     args.g_row_sums);
  }
}

template <typename T>
void launch_add_column_parts(const MatrixArgs<T>& args, cudaStream_t stream) {
  const int64_t n = args.plan.n;
  const dim3 threads(kWarp, kPartialGroups);
  add_partials_kernel<T><<<static_cast<unsigned>(divide_up(n, kWarp)), threads, 0, stream>>>(
      args.g_column_parts, args.plan.column_parts(), 1, n, {{args.g_column_sums, nullptr}, 1});
}

// Calls body with the tile as a compile-time constant.
template <int kTile = 0, typename Body>
void dispatch_matrix_tile(int tile, const Body& body) {
  if (tile == kTile) return body(std::integral_constant<int, kTile>{});
  if constexpr (kTile + 1 < kNumMatrixTiles) dispatch_matrix_tile<kTile + 1>(tile, body);
}

template <typename F>
void launch_matrix_pass(const MatrixPassParams& p, const F& f, cudaStream_t stream) {
  const MatrixPlan plan = plan_matrix_pass(p);
  dispatch_dtype(p.dtype, [&](auto element) {
    using T = decltype(element);
    const MatrixArgs<T> args = {
        {static_cast<const T*>(p.in[0]), static_cast<const T*>(p.in[1])},
        {p.in_row_stride[0], p.in_row_stride[1]},
        static_cast<const T*>(p.x),
        static_cast<const T*>(p.y),
        static_cast<T*>(p.out),
        static_cast<T*>(p.row_sums),
        static_cast<T*>(p.column_sums),
        plan.row_scratch() > 0 ? p.scratch : nullptr,
        plan.column_scratch() > 0 ? p.scratch + plan.row_scratch() : nullptr,
        plan};
    dispatch_matrix_tile(plan.tile, [&](auto index) {
      using Config = MatrixConfig<T, index.value>;
      matrix_pass_kernel<Config, F>
          <<<static_cast<unsigned>(plan.blocks()), plan.groups * Config::kLanes, 0, stream>>>(args,
                                                                                              f);
    });
    if constexpr (F::kRowSums) {
      if (args.g_row_parts != nullptr) launch_add_row_parts(args, stream);
    }
    if constexpr (F::kColumnSums) {
      if (args.g_column_parts != nullptr) launch_add_column_parts(args, stream);
    }
  });
}

}  // namespace torchweld
