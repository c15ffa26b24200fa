// CPU. A task normalises a block of rows, or computes their gradients.
//
// Sums of a row are added in fp64 over blocks of 2048 values. A task's sums over its rows move to
// fp64 after 32 rows. How rows are split into tasks depends on the shape alone, so the results have
// the same bits with any number of threads.
#include <ATen/Dispatch.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>
#include <type_traits>
#include <vector>

#include "core/index.h"
#include "core/parallel.h"
#include "core/simd_cpu.h"
#include "layers/linear_common.h"
#include "norm/rows.h"

namespace torchweld {
namespace norm_cpu {
namespace {

constexpr int64_t kSumBlock = 2048;
constexpr int64_t kTaskCells = 16384;
constexpr int64_t kMaxChunks = 64;
constexpr int64_t kShortRows = 32;

// A matrix (rows, n) whose columns are contiguous; a copy where they are not.
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

// The scale or shift of a norm in the dtype of sums; nullptr where there is none.
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

// A row in the dtype of sums: itself, or a copy in `buffer`.
template <typename A, typename S>
inline const A* widened(const S* row, int64_t n, A* buffer) {
  if constexpr (std::is_same_v<A, S>) {
    return row;
  } else {
    for (int64_t j = 0; j < n; ++j) buffer[j] = static_cast<A>(row[j]);
    return buffer;
  }
}

// Sums of two functions of a row's columns.
template <typename A>
struct TwoSums {
  double first = 0, second = 0;

  template <typename F>
  inline void add(int64_t n, const F& f) {
    constexpr int kLanes = LaneSums<A>::kLanes;
    for (int64_t begin = 0; begin < n; begin += kSumBlock) {
      LaneSums<A> firsts, seconds;
      const int64_t end = std::min(n, begin + kSumBlock);
      int64_t j = begin;
      for (; j + kLanes <= end; j += kLanes) {
        for (int lane = 0; lane < kLanes; ++lane) {
          f(j + lane, firsts.lanes[lane], seconds.lanes[lane]);
        }
      }
      for (; j < end; ++j) f(j, firsts.lanes[0], seconds.lanes[0]);
      first += static_cast<double>(firsts.total());
      second += static_cast<double>(seconds.total());
    }
  }
};

// The mean and rstd of a row; statistics as in norm/forward.cu.
template <typename A>
struct CpuStatistics {
  A first_mean = 0, rest = 0, rstd = 0;

  inline CpuStatistics(const A* row, int64_t n, double eps, bool centred) {
    const double count = static_cast<double>(n);
    if (centred) {
      TwoSums<A> sums;
      sums.add(n, [&](int64_t j, A& sum, A&) { sum += row[j]; });
      first_mean = static_cast<A>(sums.first / count);
    }
    TwoSums<A> sums;
    const A mean = first_mean;
    sums.add(n, [&](int64_t j, A& sum, A& squares) {
      const A d = row[j] - mean;
      sum += d;
      squares += d * d;
    });
    const double left = centred ? sums.first / count : 0;
    const double variance = sums.second / count - left * left;
    rest = static_cast<A>(left);
    rstd = static_cast<A>(1 / std::sqrt((variance < 0 ? 0 : variance) + eps));
  }
};

template <typename S, typename A>
void forward(const NormInputs& in, const NormResults& out) {
  const CpuRows x(in.x);
  const CpuRows residual(in.residual.value_or(in.x));
  const CpuVector<A> scales(in.weight, in.weight_offset), shifts(in.bias);
  const A *scale = scales.data(), *shift = shifts.data();
  const bool adds = is_given(in.residual);
  const int64_t n = x.n, task_rows = std::max<int64_t>(1, kTaskCells / n);
  S* const sum = adds ? out.sum.mutable_data_ptr<S>() : nullptr;
  S* const y = out.y.mutable_data_ptr<S>();
  A* const mean = out.mean.defined() ? out.mean.mutable_data_ptr<A>() : nullptr;
  A* const rstd = out.rstd.defined() ? out.rstd.mutable_data_ptr<A>() : nullptr;
  parallel_tasks(divide_up(x.rows, task_rows), [&](int64_t task) {
    std::vector<A> buffer(n);
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
        const A* row = widened<A>(of_row, n, buffer.data());
        const CpuStatistics<A> s(row, n, in.eps, in.centred);
        if (mean != nullptr) mean[i] = s.first_mean + s.rest;
        if (rstd != nullptr) rstd[i] = s.rstd;
        S* to = y + i * n;
        const A first_mean = s.first_mean, rest = s.rest, factor = s.rstd;
        const auto normalised = [&](int64_t j) { return (row[j] - first_mean - rest) * factor; };
        if (scale != nullptr && shift != nullptr) {
          for (int64_t j = 0; j < n; ++j) {
            to[j] = static_cast<S>(normalised(j) * scale[j] + shift[j]);
          }
        } else if (scale != nullptr) {
          for (int64_t j = 0; j < n; ++j) to[j] = static_cast<S>(normalised(j) * scale[j]);
        } else if (shift != nullptr) {
          for (int64_t j = 0; j < n; ++j) to[j] = static_cast<S>(normalised(j) + shift[j]);
        } else {
          for (int64_t j = 0; j < n; ++j) to[j] = static_cast<S>(normalised(j));
        }
      }
    });
  });
}

// The sums over a task's rows of dy * xhat and dy.
template <typename A>
struct VectorSums {
  std::vector<A> short_scale, short_shift;
  double *scale, *shift;
  int64_t rows = 0;

  VectorSums(int64_t n, double* scale, double* shift)
      : short_scale(n), short_shift(n), scale(scale), shift(shift) {}

  inline void add(const A* dy, const A* x, A mean, A rstd, int64_t n) {
    A *to_scale = short_scale.data(), *to_shift = short_shift.data();
    for (int64_t j = 0; j < n; ++j) {
      to_scale[j] += dy[j] * ((x[j] - mean) * rstd);
      to_shift[j] += dy[j];
    }
    if (++rows % kShortRows == 0) flush(n);
  }
  inline void flush(int64_t n) {
    for (int64_t j = 0; j < n; ++j) {
      scale[j] += static_cast<double>(short_scale[j]);
      shift[j] += static_cast<double>(short_shift[j]);
      short_scale[j] = short_shift[j] = 0;
    }
  }
};

// The rows' dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) + dsum, with g = dy * scale.
template <typename S, typename A>
inline void row_gradient(S* dx, const A* dy, const A* x, const A* scale, const S* dsum, A mean,
                         A rstd, int64_t n, bool centred) {
  const auto run = [&](const auto& g) {
    TwoSums<A> sums;
    sums.add(n, [&](int64_t j, A& of_g, A& of_product) {
      const A grad = g(j);
      of_g += grad;
      of_product += grad * ((x[j] - mean) * rstd);
    });
    const double count = static_cast<double>(n);
    const A mean_g = static_cast<A>(centred ? sums.first / count : 0);
    const A mean_product = static_cast<A>(sums.second / count);
    const auto value = [&](int64_t j) {
      return rstd * (g(j) - (mean_g + ((x[j] - mean) * rstd) * mean_product));
    };
    if (dsum != nullptr) {
      for (int64_t j = 0; j < n; ++j) {
        dx[j] = static_cast<S>(value(j) + static_cast<A>(dsum[j]));
      }
    } else {
      for (int64_t j = 0; j < n; ++j) dx[j] = static_cast<S>(value(j));
    }
  };
  if (scale != nullptr) {
    run([&](int64_t j) { return dy[j] * scale[j]; });
  } else {
    run([&](int64_t j) { return dy[j]; });
  }
}

// to[j] = the sum of the chunks' sums, chunks `stride` apart.
template <typename S>
void add_chunks(const Tensor& to, const double* sums, int64_t chunks, int64_t stride) {
  S* out = to.mutable_data_ptr<S>();
  for (int64_t j = 0; j < to.numel(); ++j) {
    double sum = 0;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) sum += sums[chunk * stride + j];
    out[j] = static_cast<S>(sum);
  }
}

template <typename S, typename A>
void backward(const NormUpstream& in, const NormGradients& out) {
  const CpuRows dys(in.dy), xs(in.x), dsums(in.dsum.value_or(in.dy));
  const CpuVector<A> scales(in.weight, in.weight_offset);
  const Tensor means = in.centred ? in.mean.contiguous() : Tensor(), rstds = in.rstd.contiguous();
  const A* mean = in.centred ? means.const_data_ptr<A>() : nullptr;
  const A* rstd = rstds.const_data_ptr<A>();
  const int64_t n = xs.n, rows = xs.rows;
  const bool sums_rows = out.dweight.numel() > 0 || out.dbias.numel() > 0;
  const bool wants_x = out.dx.numel() > 0;
  const int64_t block = std::max<int64_t>(1, kTaskCells / n);
  const int64_t task_rows = sums_rows ? std::max(block, divide_up(rows, kMaxChunks)) : block;
  const int64_t tasks = divide_up(rows, task_rows);
  std::vector<double> vectors(sums_rows ? tasks * 2 * n : 0);
  parallel_tasks(tasks, [&](int64_t task) {
    constexpr bool kWidens = !std::is_same_v<A, S>;
    std::vector<A> dy_buffer(kWidens ? n : 0), x_buffer(kWidens ? n : 0);
    double* const chunk = sums_rows ? vectors.data() + task * 2 * n : nullptr;
    VectorSums<A> sums(sums_rows ? n : 0, chunk, chunk + (sums_rows ? n : 0));
    const int64_t first = task * task_rows, last = std::min(rows, first + task_rows);
    with_vectors([&] {
      for (int64_t i = first; i < last; ++i) {
        const A* dy = widened<A>(dys.row<S>(i), n, dy_buffer.data());
        const A* x = widened<A>(xs.row<S>(i), n, x_buffer.data());
        const A row_mean = mean != nullptr ? mean[i] : A(0);
        if (sums_rows) sums.add(dy, x, row_mean, rstd[i], n);
        if (!wants_x) continue;
        row_gradient(out.dx.mutable_data_ptr<S>() + i * n, dy, x, scales.data(),
                     is_given(in.dsum) ? dsums.row<S>(i) : nullptr, row_mean, rstd[i], n,
                     in.centred);
      }
      if (sums_rows) sums.flush(n);
    });
  });
  if (!sums_rows) return;
  add_chunks<S>(out.dweight, vectors.data(), tasks, 2 * n);
  add_chunks<S>(out.dbias, vectors.data() + n, tasks, 2 * n);
}

}  // namespace
}  // namespace norm_cpu

void norm_forward_cpu(const NormInputs& in, const NormResults& out) {
  if (in.x.numel() == 0) {
    // The mean of no values is NaN, as in torch.
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
