// Computes LayerNorm, RMSNorm and their gradients on the CPU. Each task processes a block of rows.
//
// A sum over a row is computed in blocks of 2048 values. Each block is summed in fp32 (fp64 for
// fp64 inputs), and the sums of the blocks are added in fp64. For dscale and dshift, a task sums
// groups of 16 rows in fp32 and adds the sums of the groups in fp64. The division of the rows into
// tasks depends only on the shape, so the results have the same bits with any number of threads.
#include <ATen/Dispatch.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "core/index.h"
#include "core/linear_common.h"
#include "core/parallel.h"
#include "core/simd_cpu.h"
#include "norm/rows.h"

namespace torchweld {
namespace norm_cpu {
namespace {

constexpr int64_t kSumBlock = 2048;
constexpr int64_t kTaskCells = 16384;
constexpr int64_t kChunkRows = 64, kMinChunks = 8, kMaxChunks = 64;
constexpr int64_t kShortRows = 16;

// A tensor as a (rows, n) matrix with stride 1 along a row. The constructor copies a tensor that
// has another stride.
struct CpuRows {
  Tensor tensor;
  int64_t rows, n, stride;

  explicit CpuRows(const Tensor& t) : tensor(as_matrix(t)) {
    if (tensor.stride(1) != 1 && tensor.size(1) > 1) tensor = tensor.contiguous();
    rows = tensor.size(0), n = tensor.size(1), stride = tensor.stride(0);
  }
  template <typename S>
  const S* row(int64_t i) const {
    return static_cast<const S*>(tensor.const_data_ptr()) + i * stride;
  }
};

// The scale or the shift, converted to the accumulation dtype A. If the vector is not given, data()
// is nullptr.
template <typename A>
struct CpuVector {
  Tensor tensor;

  explicit CpuVector(const OptionalTensor& t, double offset = 0) {
    if (is_given(t)) tensor = t->to(c10::CppTypeToScalarType<A>::value);
    if (is_given(t) && offset != 0) tensor = tensor + offset;
    if (is_given(t)) tensor = tensor.contiguous();
  }
  const A* data() const { return tensor.defined() ? tensor.const_data_ptr<A>() : nullptr; }
};

// Returns a row in the accumulation dtype A. If the row has this dtype, returns the row itself;
// otherwise converts the row into `buffer` and returns `buffer`.
template <typename A, typename S>
inline const A* widened(const S* row, int64_t n, A* buffer) {
  if constexpr (std::is_same_v<A, S>) {
    return row;
  } else {
    for (int64_t j = 0; j < n; ++j) buffer[j] = static_cast<A>(row[j]);
    return buffer;
  }
}

// Returns a sum over the columns of a row. The function calls add(sum, j) to add up the columns. If
// `sum` is a scalar, add must add column j to it. If `sum` is a vector, add must add the columns
// from j on to the lanes of `sum`.
template <typename A, typename F>
inline double sum_columns(int64_t n, const F& add) {
  using V = typename CpuLanes<A>::Type;
  constexpr int kLanes = CpuLanes<A>::kCount, kChains = 4;
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += kSumBlock) {
    V sums[kChains] = {};
    A last = 0;
    const int64_t end = std::min(n, begin + kSumBlock);
    int64_t j = begin;
    for (; j + kChains * kLanes <= end; j += kChains * kLanes) {
      add(sums[0], j);
      add(sums[1], j + kLanes);
      add(sums[2], j + 2 * kLanes);
      add(sums[3], j + 3 * kLanes);
    }
    for (; j + kLanes <= end; j += kLanes) add(sums[0], j);
    for (; j < end; ++j) add(last, j);
    const V sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    for (int lane = 0; lane < kLanes; ++lane) last += sum[lane];
    total += static_cast<double>(last);
  }
  return total;
}

template <typename A>
inline A median(A a, A b, A c) {
  return std::max(std::min(a, b), std::min(std::max(a, b), c));
}

// The statistics of a row. The mean is first_mean + rest. Callers must first subtract first_mean
// from x and then subtract `rest`, so that the error does not grow with |mean| / std (see
// norm/forward.cuh).
template <typename A>
struct CpuStatistics {
  A first_mean = 0, rest = 0, rstd = 0;

  inline explicit CpuStatistics(A saved_rstd) : rstd(saved_rstd) {}

  inline CpuStatistics(const A* row, int64_t n, double eps, bool centred) {
    const double count = static_cast<double>(n);
    double left = 0;
    if (centred) {
      // NOTE: the differences from a usual value have the size of the deviations, so their sum
      // loses no digits. In a row of equal values, all differences and deviations are 0.
      const A pivot = median(row[0], row[n / 2], row[n - 1]);
      const double above = sum_columns<A>(n, [&](auto& sum, int64_t j) {
        std::decay_t<decltype(sum)> value;
        load_lanes(value, row + j);
        sum += value - pivot;
      });
      const double mean = static_cast<double>(pivot) + above / count;
      first_mean = static_cast<A>(mean);
      left = mean - static_cast<double>(first_mean);
      rest = static_cast<A>(left);
    }
    const A mean = first_mean;
    const double squares = sum_columns<A>(n, [&](auto& sum, int64_t j) {
      std::decay_t<decltype(sum)> d;
      load_lanes(d, row + j);
      d -= mean;
      sum += d * d;
    });
    const double variance = squares / count - left * left;
    rstd = static_cast<A>(1 / std::sqrt((variance < 0 ? 0 : variance) + eps));
  }
};

// silu(x) and its derivative.
template <typename A>
struct CpuSilu {
  A value, slope;
  inline explicit CpuSilu(A x) {
    const A s = 1 / (1 + exp_in_vectors(-x));
    value = x * s;
    slope = s * (1 + x * (1 - s));
  }
};

template <typename S, typename A>
void forward(const NormInputs& in, const NormResults& out) {
  const CpuRows x(in.x);
  const CpuRows residual(in.residual.value_or(in.x));
  const CpuVector<A> scales(in.weight, in.weight_offset), shifts(in.bias);
  const A *scale = scales.data(), *shift = shifts.data();
  const bool adds = is_given(in.residual), gated = is_given(in.gate);
  const CpuRows gates(in.gate.value_or(in.x));
  const int64_t n = x.n, task_rows = std::max<int64_t>(1, kTaskCells / n);
  S* const sum = adds ? out.sum.mutable_data_ptr<S>() : nullptr;
  S* const y = out.y.mutable_data_ptr<S>();
  A* const mean = out.mean.defined() ? out.mean.mutable_data_ptr<A>() : nullptr;
  A* const rstd = out.rstd.defined() ? out.rstd.mutable_data_ptr<A>() : nullptr;
  const Tensor rstds = in.saved_rstd.defined() ? in.saved_rstd.contiguous() : Tensor();
  const A* const saved_rstd = rstds.defined() ? rstds.const_data_ptr<A>() : nullptr;
  parallel_tasks(divide_up(x.rows, task_rows), [&](int64_t task) {
    std::vector<A> buffer(n), factors(gated ? n : 0);
    const int64_t first = task * task_rows, last = std::min(x.rows, first + task_rows);
    with_vectors([&] {
      for (int64_t i = first; i < last; ++i) {
        const S* of_row = x.row<S>(i);
        if (adds) {
          const S* added = residual.row<S>(i);
          S* to = sum + i * n;
          for (int64_t j = 0; j < n; ++j) {
            to[j] = static_cast<S>(static_cast<A>(of_row[j]) + static_cast<A>(added[j]));
          }
          of_row = to;
        }
        const A* row =
            gated && in.gate_first ? buffer.data() : widened<A>(of_row, n, buffer.data());
        if (gated) {
          const S* gate = gates.row<S>(i);
          for (int64_t j = 0; j < n; ++j) factors[j] = CpuSilu<A>(static_cast<A>(gate[j])).value;
          if (in.gate_first) {
            for (int64_t j = 0; j < n; ++j) buffer[j] = static_cast<A>(of_row[j]) * factors[j];
          } else if (scale != nullptr) {
            for (int64_t j = 0; j < n; ++j) factors[j] *= scale[j];
          }
        }
        const A* const row_scale = gated && !in.gate_first ? factors.data() : scale;
        const CpuStatistics<A> s = saved_rstd != nullptr
                                       ? CpuStatistics<A>(saved_rstd[i])
                                       : CpuStatistics<A>(row, n, in.eps, in.centred);
        if (mean != nullptr) mean[i] = s.first_mean + s.rest;
        if (rstd != nullptr) rstd[i] = s.rstd;
        S* to = y + i * n;
        const A first_mean = s.first_mean, rest = s.rest, factor = s.rstd;
        const auto normalised = [&](int64_t j) { return (row[j] - first_mean - rest) * factor; };
        if (row_scale != nullptr && shift != nullptr) {
          for (int64_t j = 0; j < n; ++j) {
            to[j] = static_cast<S>(normalised(j) * row_scale[j] + shift[j]);
          }
        } else if (row_scale != nullptr) {
          for (int64_t j = 0; j < n; ++j) to[j] = static_cast<S>(normalised(j) * row_scale[j]);
        } else if (shift != nullptr) {
          for (int64_t j = 0; j < n; ++j) to[j] = static_cast<S>(normalised(j) + shift[j]);
        } else {
          for (int64_t j = 0; j < n; ++j) to[j] = static_cast<S>(normalised(j));
        }
      }
    });
  });
}

// A task's sums over its rows. `scale` is the sum of dy * xhat, and `shift` is the sum of dy.
// nullptr stands for a sum that is not requested.
template <typename A>
struct VectorSums {
  A *scale, *shift;
};

// Adds dy * xhat and dy of a row to `vectors`. If dx is not nullptr, also computes dx of the row:
// dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) + dsum, with g = dy * scale.
template <typename S, typename A>
inline void row_gradient(S* dx, const A* dy, const A* x, const A* scale, const S* dsum, A mean,
                         A rstd, int64_t n, bool centred, const VectorSums<A>& vectors) {
  const auto add_to = [](A* sums, const auto& value) {
    std::decay_t<decltype(value)> sum;
    load_lanes(sum, sums);
    sum += value;
    std::memcpy(sums, &sum, sizeof(sum));
  };
  const auto load_g = [&](auto& g, int64_t j) {
    load_lanes(g, dy + j);
    if (scale == nullptr) return;
    std::decay_t<decltype(g)> factor;
    load_lanes(factor, scale + j);
    g *= factor;
  };
  const double count = static_cast<double>(n);
  double sum_g = 0;
  if (centred && dx != nullptr) {
    sum_g = sum_columns<A>(n, [&](auto& sum, int64_t j) {
      std::decay_t<decltype(sum)> g;
      load_g(g, j);
      sum += g;
    });
  }
  const double sum_product = sum_columns<A>(n, [&](auto& sum, int64_t j) {
    std::decay_t<decltype(sum)> g, xhat, grad;
    load_g(g, j);
    load_lanes(grad, dy + j);
    load_lanes(xhat, x + j);
    xhat = (xhat - mean) * rstd;
    sum += g * xhat;
    if (vectors.scale != nullptr) add_to(vectors.scale + j, grad * xhat);
    if (vectors.shift != nullptr) add_to(vectors.shift + j, grad);
  });
  if (dx == nullptr) return;
  const A mean_g = static_cast<A>(sum_g / count),
          mean_product = static_cast<A>(sum_product / count);
  const auto write = [&](const auto& g, const auto& added) {
    for (int64_t j = 0; j < n; ++j) {
      const A xhat = (x[j] - mean) * rstd;
      dx[j] = static_cast<S>(rstd * (g(j) - (mean_g + xhat * mean_product)) + added(j));
    }
  };
  const auto scaled = [&](int64_t j) { return dy[j] * scale[j]; };
  const auto plain = [&](int64_t j) { return dy[j]; };
  const auto given = [&](int64_t j) { return static_cast<A>(dsum[j]); };
  const auto none = [](int64_t) { return A(0); };
  const auto write_g = [&](const auto& g) { dsum != nullptr ? write(g, given) : write(g, none); };
  scale != nullptr ? write_g(scaled) : write_g(plain);
}

// Adds up the sums of all tasks and stores the result in `to`. `sums` is a (chunks, n) matrix. Each
// task has one row of this matrix. `to` has the dtype S of the rows or the accumulation dtype A.
template <typename S, typename A>
void add_chunks(const Tensor& to, const double* sums, int64_t chunks, int64_t n) {
  std::vector<double> total(sums, sums + n);
  for (int64_t chunk = 1; chunk < chunks; ++chunk) {
    for (int64_t j = 0; j < n; ++j) total[j] += sums[chunk * n + j];
  }
  const auto write = [&](auto* out) {
    using Out = std::remove_pointer_t<decltype(out)>;
    for (int64_t j = 0; j < n; ++j) out[j] = static_cast<Out>(total[j]);
  };
  to.element_size() == sizeof(S) ? write(to.mutable_data_ptr<S>())
                                 : write(to.mutable_data_ptr<A>());
}

template <typename S, typename A>
void backward(const NormUpstream& in, const NormGradients& out) {
  const CpuRows dys(in.dy), xs(in.x), dsums(in.dsum.value_or(in.dy));
  const CpuVector<A> scales(in.weight, in.weight_offset);
  const Tensor means = in.centred ? in.mean.contiguous() : Tensor(), rstds = in.rstd.contiguous();
  const A* mean = in.centred ? means.const_data_ptr<A>() : nullptr;
  const A* rstd = rstds.const_data_ptr<A>();
  const int64_t n = xs.n, rows = xs.rows;
  const bool wants_scale = out.dweight.numel() > 0, wants_shift = out.dbias.numel() > 0;
  const bool sums_rows = wants_scale || wants_shift;
  S* const dx = out.dx.numel() > 0 ? out.dx.mutable_data_ptr<S>() : nullptr;
  const CpuRows gates(in.gate.value_or(in.x));
  S* const dgate =
      out.dgate.defined() && out.dgate.numel() > 0 ? out.dgate.mutable_data_ptr<S>() : nullptr;
  const A* const scale = scales.data();
  // Computes the gradients of row i of rms_norm_gated. r = x is the row that is normalised or, if
  // gate_first, r = x * silu(gate); `buffers` has four rows.
  const auto gated_row = [&](int64_t i, A* buffers, const VectorSums<A>& sums) {
    A *of_y = buffers, *r = of_y + n, *dr = r + n, *factor = dr + n;
    const S *dy = dys.row<S>(i), *x = xs.row<S>(i), *gate = gates.row<S>(i);
    for (int64_t j = 0; j < n; ++j) {
      const A value = static_cast<A>(x[j]), grad = static_cast<A>(dy[j]);
      factor[j] = CpuSilu<A>(static_cast<A>(gate[j])).value;
      r[j] = in.gate_first ? value * factor[j] : value;
      of_y[j] = in.gate_first ? grad : grad * factor[j];
    }
    const bool needs_dr = dx != nullptr || (dgate != nullptr && in.gate_first);
    row_gradient<A, A>(needs_dr ? dr : nullptr, of_y, r, scale, nullptr, A(0), rstd[i], n,
                       /*centred=*/false, sums);
    for (int64_t j = 0; dx != nullptr && j < n; ++j) {
      dx[i * n + j] = static_cast<S>(in.gate_first ? dr[j] * factor[j] : dr[j]);
    }
    for (int64_t j = 0; dgate != nullptr && j < n; ++j) {
      const A slope = CpuSilu<A>(static_cast<A>(gate[j])).slope;
      const A normed = r[j] * rstd[i] * (scale != nullptr ? scale[j] : A(1));
      const A of_factor =
          in.gate_first ? dr[j] * static_cast<A>(x[j]) : static_cast<A>(dy[j]) * normed;
      dgate[i * n + j] = static_cast<S>(of_factor * slope);
    }
  };
  const int64_t block = std::max<int64_t>(1, kTaskCells / n);
  // Each sum of a task takes n fp64 values, which is as much memory as two fp32 rows. Therefore
  // there is only about one task per 64 rows. `chunks` is at least 8 and at most 64.
  const int64_t chunks = std::clamp(rows / kChunkRows, kMinChunks, kMaxChunks);
  const int64_t task_rows = sums_rows ? std::max(block, divide_up(rows, chunks)) : block;
  const int64_t tasks = divide_up(rows, task_rows);
  std::vector<double> scale_sums(wants_scale ? tasks * n : 0);
  std::vector<double> shift_sums(wants_shift ? tasks * n : 0);
  parallel_tasks(tasks, [&](int64_t task) {
    constexpr bool kWidens = !std::is_same_v<A, S>;
    std::vector<A> dy_buffer(kWidens ? n : 0), x_buffer(kWidens ? n : 0);
    std::vector<A> gated_buffers(is_given(in.gate) ? 4 * n : 0);
    std::vector<A> short_scale(wants_scale ? n : 0), short_shift(wants_shift ? n : 0);
    const VectorSums<A> sums = {wants_scale ? short_scale.data() : nullptr,
                                wants_shift ? short_shift.data() : nullptr};
    const auto flush = [&](A* from, double* to) {
      if (from == nullptr) return;
      for (int64_t j = 0; j < n; ++j) to[j] += static_cast<double>(from[j]);
      std::fill_n(from, n, A(0));
    };
    const int64_t first = task * task_rows, last = std::min(rows, first + task_rows);
    with_vectors([&] {
      for (int64_t i = first; i < last; ++i) {
        if (is_given(in.gate)) {
          gated_row(i, gated_buffers.data(), sums);
        } else {
          const A* dy = widened<A>(dys.row<S>(i), n, dy_buffer.data());
          const A* x = widened<A>(xs.row<S>(i), n, x_buffer.data());
          const A row_mean = mean != nullptr ? mean[i] : A(0);
          row_gradient(dx != nullptr ? dx + i * n : nullptr, dy, x, scale,
                       is_given(in.dsum) ? dsums.row<S>(i) : nullptr, row_mean, rstd[i], n,
                       in.centred, sums);
        }
        if ((i + 1 - first) % kShortRows != 0 && i + 1 < last) continue;
        flush(sums.scale, scale_sums.data() + task * n);
        flush(sums.shift, shift_sums.data() + task * n);
      }
    });
  });
  if (wants_scale) add_chunks<S, A>(out.dweight, scale_sums.data(), tasks, n);
  if (wants_shift) add_chunks<S, A>(out.dbias, shift_sums.data(), tasks, n);
}

}  // namespace
}  // namespace norm_cpu

void norm_forward_cpu(const NormInputs& in, const NormResults& out) {
  if (in.x.numel() == 0) {
    // The mean of zero values is NaN, as in torch.
    for (const Tensor& t : {out.mean, out.rstd}) {
      if (t.defined()) t.fill_(std::numeric_limits<double>::quiet_NaN());
    }
    return;
  }
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, in.x.scalar_type(), "norm", [&] {
    norm_cpu::forward<scalar_t,
                      std::conditional_t<std::is_same_v<scalar_t, double>, double, float>>(in, out);
  });
}

void norm_backward_cpu(const NormUpstream& in, const NormGradients& out) {
  if (in.x.numel() == 0) {
    out.dweight.zero_();
    out.dbias.zero_();
    return;
  }
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, in.x.scalar_type(), "norm", [&] {
    norm_cpu::backward<scalar_t,
                       std::conditional_t<std::is_same_v<scalar_t, double>, double, float>>(in,
                                                                                            out);
  });
}

}  // namespace torchweld
