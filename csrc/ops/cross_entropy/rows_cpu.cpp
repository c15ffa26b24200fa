// Computes cross_entropy on the CPU. One loop over a row computes the statistics, and another loop
// computes the gradient. Both loops process the row in blocks. A block is converted to the
// accumulation dtype and stays in the L1 cache.
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "core/index.h"
#include "core/parallel.h"
#include "losses/cpu.h"
#include "ops/cross_entropy/engine.h"

namespace torchweld::cross_entropy_op {
namespace {

#ifdef TW_SIMD_TARGETS
// These functions convert float16 to float, or float to float16, 16 elements at a time. They return
// the number of converted elements. The caller must convert the remaining elements.
// NOTE: the compiler does not vectorise the conversions of c10::Half.
__attribute__((target("avx512f"))) int64_t convert_avx512(float* to, const at::Half* from,
                                                          int64_t n) {
  int64_t j = 0;
  for (; j + 16 <= n; j += 16) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + j));
    _mm512_storeu_ps(to + j, _mm512_cvtph_ps(halves));
  }
  return j;
}
__attribute__((target("avx512f"))) int64_t convert_avx512(at::Half* to, const float* from,
                                                          int64_t n) {
  int64_t j = 0;
  for (; j + 16 <= n; j += 16) {
    const __m256i halves = _mm512_cvtps_ph(_mm512_loadu_ps(from + j), _MM_FROUND_TO_NEAREST_INT);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + j), halves);
  }
  return j;
}
#endif

template <typename To, typename From>
void convert_row(To* to, const From* from, int64_t n) {
  if constexpr (std::is_same_v<To, From>) {
    if (to != from) std::memcpy(to, from, n * sizeof(To));
    return;
  }
  int64_t begin = 0;
#ifdef TW_SIMD_TARGETS
  if constexpr (std::is_same_v<To, at::Half> || std::is_same_v<From, at::Half>) {
    if (simd_level() == 2) begin = convert_avx512(to, from, n);
  }
#endif
  with_vectors([&] {
    for (int64_t j = begin; j < n; ++j) to[j] = static_cast<To>(from[j]);
  });
}

// The operands of a call: pointers to the logits, to the vectors over all rows and to the gradient.
// T is the accumulation dtype.
template <typename scalar_t>
struct RowsCpu {
  using T = at::opmath_type<scalar_t>;
  static constexpr T kInfinity = std::numeric_limits<T>::infinity();
  static constexpr int64_t kBlock = 2048;  // number of logits in a block, which stays in L1

  const scalar_t* logits;
  int64_t n, row_stride;
  const int64_t* targets;
  int64_t ignore_index;
  LogitScale<T> scale;
  CrossEntropyTerms<T> terms;
  T *loss, *max, *log_sum;
  const T* dloss;
  int64_t dloss_stride;
  scalar_t* dlogits;

  void compute(int64_t row) const {
    const int64_t target = targets[row];
    scalar_t* const out = dlogits == nullptr ? nullptr : dlogits + row * n;
    if (target == ignore_index) {
      if (out != nullptr) std::fill_n(out, n, scalar_t(0));
      return;
    }
    const scalar_t* const from = logits + row * row_stride;
    T z_target = static_cast<T>(from[target]);
    apply_scale(&z_target, 1, scale);
    if (loss != nullptr) {
      const LogitStatistics<T> found = statistics(from, z_target);
      loss[row] = terms.loss(found);
      max[row] = found.max;
      log_sum[row] = found.log_sum;
    }
    if (out == nullptr) return;
    const auto own =
        RowGradient<T>::of_loss(dloss[row * dloss_stride], max[row], log_sum[row], terms, n);
    const T p_target = exp_of_negative(z_target - own.shift);
    const T hit = own.of_logit(z_target, p_target, scale) + own.target * scale.slope(z_target);
    store_gradient(out, from, own);
    out[target] = static_cast<scalar_t>(hit);
  }

 private:
  // Returns the statistics of a row. The sum of a block is relative to the maximum of the block.
  // The fp64 sum over the blocks is relative to the largest maximum so far.
  LogitStatistics<T> statistics(const scalar_t* from, T z_target) const {
    const T pivot = pivot_of(z_target);
    T z[kBlock], max = -kInfinity;
    double sum = 0, total = 0;
    for (int64_t first = 0; first < n; first += kBlock) {
      const int64_t size = std::min(kBlock, n - first);
      convert_row(z, from + first, size);
      const T block_max = scale_row<T>(z, nullptr, size, scale);
      // If the block's maximum is -inf, subtract 0 instead of this maximum, because -inf - (-inf)
      // is NaN.
      const T shift = block_max == -kInfinity ? T(0) : block_max;
      T block_sum = 0;
      with_vectors([&] {
        constexpr int kLanes = LaneSums<T>::kLanes;
        if (terms.label_smoothing != T(0)) {
          LaneSums<T> above;
          int64_t j = 0;
          for (; j + kLanes <= size; j += kLanes) {
            for (int lane = 0; lane < kLanes; ++lane) above.lanes[lane] += z[j + lane] - pivot;
          }
          for (; j < size; ++j) above.lanes[0] += z[j] - pivot;
          total += above.total();
        }
        static_assert(kBlock % kLanes == 0);
        LaneSums<T> sums;
        // Fill the lanes behind the last logit with -inf. The exponential of -inf adds 0 to the
        // sum.
        std::fill(z + size, z + divide_up(size, int64_t{kLanes}) * kLanes, -kInfinity);
        for (int64_t j = 0; j < size; j += kLanes) {
          for (int lane = 0; lane < kLanes; ++lane) {
            sums.lanes[lane] += exp_of_negative(z[j + lane] - shift);
          }
        }
        block_sum = sums.total();
      });
      const T raised = block_max > max ? block_max : max;
      sum = first == 0 ? block_sum
                       : sum * factor(max, raised) + block_sum * factor(block_max, raised);
      max = raised;
    }
    // If all logits of a row are -inf, the results of the row are NaN, as in torch.
    if (max == -kInfinity) max = std::numeric_limits<T>::quiet_NaN();
    const T mean = static_cast<T>(total / static_cast<double>(n)) + (pivot - max);
    return {max, static_cast<T>(std::log(sum)), z_target - max, mean, T(0)};
  }

  // Returns exp(from - to). This factor converts a sum relative to the maximum `from` into a sum
  // relative to the maximum `to`.
  static double factor(T from, T to) {
    return from == -kInfinity ? 0 : std::exp(static_cast<double>(from) - static_cast<double>(to));
  }

  // Stores the gradient of a row without the term of its target.
  void store_gradient(scalar_t* out, const scalar_t* from, const RowGradient<T>& own) const {
    const T shift = own.shift, slope = 1 / scale.temperature;
    const T factor = own.scale * slope, uniform = own.uniform * slope;
    T block[kBlock];
    for (int64_t first = 0; first < n; first += kBlock) {
      const int64_t size = std::min(kBlock, n - first);
      T* z = block;
      if constexpr (std::is_same_v<scalar_t, T>) z = out + first;
      convert_row(z, from + first, size);
      apply_scale(z, size, scale);
      with_vectors([&] {
        if (scale.softcap == T(0)) {
          for (int64_t j = 0; j < size; ++j)
            z[j] = exp_of_negative(z[j] - shift) * factor + uniform;
        } else {
          for (int64_t j = 0; j < size; ++j) {
            z[j] = own.of_logit(z[j], exp_of_negative(z[j] - shift), scale);
          }
        }
      });
      convert_row(out + first, z, size);
    }
  }
};

template <typename scalar_t>
void compute_rows(const LogitInputs& in, const LogitRows& rows, const Tensor& dloss,
                  const Tensor& dlogits) {
  using T = at::opmath_type<scalar_t>;
  Tensor logits = as_matrix(in.logits);
  if (logits.size(1) > 1 && logits.stride(1) != 1) logits = logits.contiguous();
  const int64_t count = in.targets.numel(), n = logits.size(1);
  const RowsCpu<scalar_t> all = {
      logits.const_data_ptr<scalar_t>(),
      n,
      logits.stride(0),
      in.targets.const_data_ptr<int64_t>(),
      *in.options.ignore_index,
      in.options.logit_scale<T>(),
      in.options.terms<T>(),
      rows.loss.defined() ? rows.loss.mutable_data_ptr<T>() : nullptr,
      rows.max.mutable_data_ptr<T>(),
      rows.log_sum.mutable_data_ptr<T>(),
      dloss.defined() ? dloss.const_data_ptr<T>() : nullptr,
      dloss.defined() ? dloss.stride(0) : 0,
      dlogits.defined() ? dlogits.mutable_data_ptr<scalar_t>() : nullptr};
  // Each task gets at least about 4096 logits.
  const int64_t tasks = std::min({count, int64_t{64}, divide_up(count * n, 4096)});
  parallel_tasks(tasks, [&](int64_t task) {
    const int64_t end = (task + 1) * count / tasks;
    for (int64_t row = task * count / tasks; row < end; ++row) all.compute(row);
  });
}

}  // namespace

void cross_entropy_rows_cpu(const char* op, const LogitInputs& in, const LogitRows& rows,
                            const Tensor& dloss, const Tensor& dlogits) {
  check_targets(op, in.targets, in.logits.size(-1), in.options);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, in.logits.scalar_type(),
                                  "cross_entropy",
                                  [&] { compute_rows<scalar_t>(in, rows, dloss, dlogits); });
}

}  // namespace torchweld::cross_entropy_op
