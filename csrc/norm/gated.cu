// Computes rms_norm_gated and its gradients. A warp holds a short row, a block holds a long one. A
// thread reads its columns twice, for the sum over the row and for the results; it finds them in L1
// the second time. The gradient of the scale is a pass of its own over the columns.
//
//   dx = rstd * (g - rhat * mean(g * rhat)),  dgate = dy * rhat * scale * silu'(gate)
//   g = dy * scale * silu(gate),  rhat = x * rstd
// With gate_first, g = dy * scale and rhat = x * silu(gate) * rstd. The first formula is then the
// gradient with respect to r, and dx = dr * silu(gate), dgate = dr * x * silu'(gate).
#include "norm/gated.h"

#include "core/launch.h"
#include "device/activation.cuh"
#include "norm/norm_rows.cuh"
#include "pointwise/column_pass.cuh"

namespace torchweld {
namespace {

constexpr int kGatedThreads = 256;
constexpr int64_t kLongRow = 2048;  // a block holds rows with more values

// The columns of x and of the gate in the registers of a thread, in fp32.
template <bool kExact, int kElems>
struct GatedColumns {
  float x[kElems], value[kElems], slope[kElems];  // value and slope are those of silu(gate)

  template <typename T>
  __device__ __forceinline__ GatedColumns(const T* g_x, const T* g_gate) {
    const auto in = load_vec<T, kElems>(g_x), gate = load_vec<T, kElems>(g_gate);
#pragma unroll
    for (int j = 0; j < kElems; ++j) {
      const float z = to_float(gate.values[j]);
      const Sigmoids<kExact> s(z);
      x[j] = to_float(in.values[j]);
      value[j] = z * s.of_x;
      slope[j] = s.of_x * (1.f + z * s.complement);
    }
  }
};

template <int kThreadsPerRow>
__device__ __forceinline__ int64_t row_of_thread(int64_t first_row) {
  return first_row + int64_t(blockIdx.x) * (kGatedThreads / kThreadsPerRow) +
         threadIdx.x / kThreadsPerRow;
}

template <typename T, typename V, int kElems, int kThreadsPerRow, bool kFirst>
__global__ void __launch_bounds__(kGatedThreads)
    norm_gated_kernel(const __grid_constant__ NormGatedParams p, int64_t first_row) {
  using Columns = GatedColumns<sizeof(T) == 4, kElems>;
  __shared__ RowSums<kThreadsPerRow> s_sums;
  const int64_t row = row_of_thread<kThreadsPerRow>(first_row);
  if (kThreadsPerRow == kWarp && row >= p.rows) return;
  const T* g_x = static_cast<const T*>(p.x) + row * p.x_row_stride;
  const T* g_gate = static_cast<const T*>(p.gate) + row * p.gate_row_stride;
  T* g_y = static_cast<T*>(p.y) + row * p.n;
  constexpr int kStep = kThreadsPerRow * kElems;
  const int64_t start = threadIdx.x % kThreadsPerRow * kElems;
  float sum = 0.f;
  for (int64_t c = start; c < p.n; c += kStep) {
    if constexpr (kFirst) {
      const Columns in(g_x + c, g_gate + c);
#pragma unroll
      for (int j = 0; j < kElems; ++j) {
        const float r = in.x[j] * in.value[j];
        sum = fmaf(r, r, sum);
      }
    } else {
      const auto x = load_vec<T, kElems>(g_x + c);
#pragma unroll
      for (int j = 0; j < kElems; ++j) {
        const float r = to_float(x.values[j]);
        sum = fmaf(r, r, sum);
      }
    }
  }
  sum = s_sums.sum(sum);
  const float rstd = 1.f / sqrtf(sum / static_cast<float>(p.n) + p.eps);
  if (p.rstd != nullptr && start == 0) p.rstd[row] = rstd;
  for (int64_t c = start; c < p.n; c += kStep) {
    const Columns in(g_x + c, g_gate + c);
    float scale[kElems];
    load_scale<V>(scale, p.scale, c, 0.f);
    Vec<T, kElems> y;
#pragma unroll
    for (int j = 0; j < kElems; ++j) {
      const float normed =
          kFirst ? in.x[j] * in.value[j] * rstd * scale[j] : in.x[j] * rstd * scale[j];
      y.values[j] = from_float<T>(kFirst ? normed : normed * in.value[j]);
    }
    store_vec(g_y + c, y);
  }
}

template <typename T, typename V, int kElems, int kThreadsPerRow, bool kFirst>
__global__ void __launch_bounds__(kGatedThreads)
    norm_gated_backward_kernel(const __grid_constant__ NormGatedBackwardParams p,
                               int64_t first_row) {
  __shared__ RowSums<kThreadsPerRow> s_sums;
  const int64_t row = row_of_thread<kThreadsPerRow>(first_row);
  if (kThreadsPerRow == kWarp && row >= p.rows) return;
  const T* g_dy = static_cast<const T*>(p.dy) + row * p.dy_row_stride;
  const T* g_x = static_cast<const T*>(p.x) + row * p.x_row_stride;
  const T* g_gate = static_cast<const T*>(p.gate) + row * p.gate_row_stride;
  const float rstd = p.rstd[row];

  // For columns from c on: calls body(j, in, dy * scale, r).
  const auto for_columns = [&](int64_t c, const auto& body) {
    const GatedColumns<sizeof(T) == 4, kElems> in(g_x + c, g_gate + c);
    const auto dy = load_vec<T, kElems>(g_dy + c);
    float scale[kElems];
    load_scale<V>(scale, p.scale, c, 0.f);
#pragma unroll
    for (int j = 0; j < kElems; ++j) {
      body(j, in, to_float(dy.values[j]) * scale[j], kFirst ? in.x[j] * in.value[j] : in.x[j]);
    }
  };

  constexpr int kStep = kThreadsPerRow * kElems;
  const int64_t start = threadIdx.x % kThreadsPerRow * kElems;
  float sum = 0.f;
  for (int64_t c = start; c < p.n; c += kStep) {
    for_columns(c, [&](int j, const auto& in, float grad, float r) {
      sum += (kFirst ? grad : grad * in.value[j]) * (r * rstd);
    });
  }
  const float mean = s_sums.sum(sum) / static_cast<float>(p.n);
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
  static constexpr int kElems = kElems_;
  static constexpr int kSums = 1;
  static constexpr bool kWrites = false;
  using Sum = ColumnSumOf<T>;
  NormGatedBackwardParams p;

  struct Loaded {
    GatedColumns<sizeof(T) == 4, kElems> in;
    Vec<T, kElems> dy;
    float rstd;
  };

  __device__ __forceinline__ Loaded load(int64_t row, int64_t column) const {
    return {{static_cast<const T*>(p.x) + row * p.x_row_stride + column,
             static_cast<const T*>(p.gate) + row * p.gate_row_stride + column},
            load_vec<T, kElems>(static_cast<const T*>(p.dy) + row * p.dy_row_stride + column),
            p.rstd[row]};
  }

  __device__ __forceinline__ void add(int64_t, int64_t, const Loaded& of,
                                      Sum (&sums)[1][kElems]) const {
#pragma unroll
    for (int j = 0; j < kElems; ++j) {
      sums[0][j] += to_float(of.dy.values[j]) * (of.in.x[j] * of.in.value[j] * of.rstd);
    }
  }
};

// Calls body(first, threads_per_row) with compile-time constants.
template <typename Body>
void dispatch_rows(bool gate_first, int64_t n, const Body& body) {
  const auto with_threads = [&](auto first) {
    n > kLongRow ? body(first, std::integral_constant<int, kGatedThreads>())
                 : body(first, std::integral_constant<int, kWarp>());
  };
  gate_first ? with_threads(std::true_type()) : with_threads(std::false_type());
}

}  // namespace

void launch_norm_gated(const NormGatedParams& p, cudaStream_t stream) {
  dispatch_access(
      p.dtype, p.n, {{p.x, p.x_row_stride}, {p.gate, p.gate_row_stride}, {p.y, p.n}, {p.scale, 0}},
      [&](auto element, auto elems) {
        using T = decltype(element);
        dispatch_vectors<T>(p.vector_dtype, [&](auto vector) {
          dispatch_rows(p.gate_first, p.n, [&](auto first, auto threads) {
            const auto kernel =
                norm_gated_kernel<T, decltype(vector), elems.value, threads.value, first.value>;
            for_each_grid_of_rows(p.rows, kGatedThreads / threads.value,
                                  [&](int64_t row, int64_t n) {
                                    launch_kernel(kernel, {n, kGatedThreads}, stream, p, row);
                                  });
          });
        });
      });
  check_launch("rms_norm_gated");
}

void launch_norm_gated_backward(const NormGatedBackwardParams& p, cudaStream_t stream) {
  dispatch_access(
      p.dtype, p.n,
      {{p.dy, p.dy_row_stride},
       {p.x, p.x_row_stride},
       {p.gate, p.gate_row_stride},
       {p.dx, p.n},
       {p.dgate, p.n},
       {p.scale, 0}},
      [&](auto element, auto elems) {
        using T = decltype(element);
        dispatch_vectors<T>(p.vector_dtype, [&](auto vector) {
          using V = decltype(vector);
          dispatch_rows(p.gate_first, p.n, [&](auto first, auto threads) {
            if (p.dx == nullptr && p.dgate == nullptr) return;
            const auto kernel =
                norm_gated_backward_kernel<T, V, elems.value, threads.value, first.value>;
            for_each_grid_of_rows(p.rows, kGatedThreads / threads.value,
                                  [&](int64_t row, int64_t n) {
                                    launch_kernel(kernel, {n, kGatedThreads}, stream, p, row);
                                  });
          });
          if (p.dscale == nullptr) return;
          const ScaleGradientOp<T, elems.value> op = {p};
          launch_column_pass<V>(op, p.rows, p.n, p.partials, {{p.dscale, nullptr}, 1}, stream);
        });
      });
  check_launch("rms_norm_gated_backward");
}

}  // namespace torchweld
