// The CPU engine of linear_cross_entropy and linear_token_logprobs (losses/loss.h).
#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "losses/cpu.h"
#include "losses/loss.h"
#include "losses/products_cpu.h"

namespace torchweld {
namespace {

// The rows of x, and the indices of the live rows. A row is live if its target is not ignored. The
// matmuls skip the rows that are not live.
struct TargetRows {
  Tensor x;        // (all rows, K)
  Tensor targets;  // (all rows,)
  Tensor indices;  // the indices of the rows that are not ignored; undefined if no row is ignored
  int64_t count;   // the number of rows that are not ignored

  TargetRows(const char* op, const Tensor& x, const Tensor& targets, int64_t n,
             const LossOptions& options)
      : x(as_matrix(x)), targets(targets), count(targets.numel()) {
    const int64_t ignored = check_targets(op, targets, n, options);
    if (ignored == 0) return;
    indices = targets.ne(*options.ignore_index).nonzero().view({-1});
    count -= ignored;
  }

  // Returns the index in x of the i-th row whose target is not ignored.
  int64_t row(int64_t i) const {
    return indices.defined() ? indices.const_data_ptr<int64_t>()[i] : i;
  }
  int64_t target(int64_t i) const { return targets.const_data_ptr<int64_t>()[row(i)]; }
  Tensor chunk(int64_t first, int64_t size) const {
    if (!indices.defined()) return x.narrow(0, first, size);
    return x.index_select(0, indices.narrow(0, first, size));
  }
};

template <typename T>
T* data_of(const Tensor& t) {
  return t.defined() ? t.mutable_data_ptr<T>() : nullptr;
}
template <typename T>
const T* const_data_of(const Tensor& t) {
  return t.defined() ? t.const_data_ptr<T>() : nullptr;
}

// The options of a loss, and vectors with one element per row. The vectors have the accumulation
// dtype.
template <typename T>
struct RowVectors {
  LossKind kind;
  LogitScale<T> scale;
  CrossEntropyTerms<T> terms;
  WantedStatistics wanted;
  const T* bias;
  T *loss, *lse, *entropy, *mean;
  const T *dloss, *dentropy, *dlse, *dmean;
  int64_t dloss_stride;

  void store(int64_t row, const LogitStatistics<T>& found) const {
    loss[row] = kind == LossKind::kCrossEntropy ? terms.loss(found) : found.logprob();
    lse[row] = found.lse();
    if (entropy != nullptr) entropy[row] = found.entropy();
    if (mean != nullptr) mean[row] = found.row_mean();
  }
  RowGradient<T> gradient(int64_t row, int64_t n) const {
    const T d = dloss[row * dloss_stride];
    if (kind == LossKind::kCrossEntropy) {
      return RowGradient<T>::of_loss(d, lse[row], terms, n, dlse == nullptr ? T(0) : dlse[row],
                                     dmean == nullptr ? T(0) : dmean[row]);
    }
    return RowGradient<T>::of_logprob(d, dentropy == nullptr ? T(0) : dentropy[row], lse[row],
                                      dentropy == nullptr ? T(0) : entropy[row]);
  }
};

// Returns dlogits as the left operand of a matmul. If E is bf16, row_gradient has stored the bf16
// values of each row at the start of the row's fp32 values.
template <typename E, typename T>
Tensor dlogits_of(const Tensor& z) {
  if constexpr (std::is_same_v<E, T>) return z;
  return z.view(c10::CppTypeToScalarType<E>()).narrow(1, 0, z.size(1));
}

// Returns the number of rows per chunk. If `sums_dweight` is true and there are several chunks, an
// (n, k) matrix of the accumulation dtype holds the sum of the dweight of all chunks. Every chunk
// reads and writes the whole matrix. To keep chunks few, the limit of the rows per chunk is at
// least k / 2. The logits of k / 2 rows need half the memory of the matrix. A single chunk needs no
// such matrix, so it may have k rows more than the limit.
int64_t chunk_rows(int64_t rows, int64_t n, int64_t k, int64_t bytes_per_logit, bool sums_dweight) {
  if (rows == 0) return 1;
  const int64_t chunk = loss_chunk_rows(rows, n, bytes_per_logit);
  if (!sums_dweight) return chunk;
  const int64_t limit = std::max(chunk, k / 2);
  return rows <= limit + k ? rows : divide_up(rows, divide_up(rows, limit));
}

// Processes all rows, one chunk at a time. E is the element type of the operands of the matmuls. It
// is scalar_t or the accumulation dtype.
template <typename scalar_t, typename E>
void loss_chunks(const TargetRows& rows, const LossInputs& in, const LossRows& results,
                 const LossUpstream& upstream, const LossGradients& grads) {
  using T = at::opmath_type<scalar_t>;
  const int64_t n = in.weight.size(0), k = in.weight.size(1);
  const at::TensorOptions sums = results.lse.options();
  const Tensor bias = is_given(in.bias) ? in.bias->to(sums.dtype()).contiguous() : Tensor();
  const RowVectors<T> vectors = {in.kind,
                                 in.options.logit_scale<T>(),
                                 in.options.terms<T>(),
                                 {in.options.needs_mean(), results.entropy.defined()},
                                 const_data_of<T>(bias),
                                 data_of<T>(results.loss),
                                 data_of<T>(results.lse),
                                 data_of<T>(results.entropy),
                                 data_of<T>(results.mean),
                                 const_data_of<T>(upstream.dloss),
                                 const_data_of<T>(upstream.dentropy),
                                 const_data_of<T>(upstream.dlse),
                                 const_data_of<T>(upstream.dmean),
                                 upstream.dloss.defined() ? upstream.dloss.stride(0) : 0};
  const int64_t chunk =
      chunk_rows(rows.count, n, k, sizeof(T), grads.wanted[1] && !std::is_same_v<scalar_t, T>);
  ParameterGradients<E, T> parameters(grads.dweight, grads.dbias,
                                      {grads.wanted[1], grads.wanted[2]},
                                      divide_up(rows.count, chunk), sums);
  Tensor dx;
  if (grads.wanted[0]) {
    dx = grads.dx.view({rows.targets.numel(), k});
    if (rows.indices.defined()) dx.zero_();
  }
  const Tensor logits = at::empty({std::min(chunk, rows.count), n}, sums);
  for (int64_t first = 0; first < rows.count; first += chunk) {
    const int64_t count = std::min(chunk, rows.count - first);
    const Tensor x = left_operand<E>(rows.chunk(first, count));
    const Tensor z = logits.narrow(0, 0, count);
    logits_into_cpu<E, T>(z, x, in.weight);
    parallel_tasks(count, [&](int64_t i) {
      const int64_t row = rows.row(first + i), target = rows.target(first + i);
      T* const z_row = z.data_ptr<T>() + i * n;
      if (results.loss.defined()) {
        vectors.store(
            row, row_statistics(z_row, vectors.bias, n, vectors.scale, target, vectors.wanted));
      } else {
        scale_row(z_row, vectors.bias, n, vectors.scale);
      }
      if (grads.any()) {
        row_gradient<scalar_t, E>(z_row, n, target, vectors.gradient(row, n), vectors.scale);
      }
    });
    if (!grads.any()) continue;
    const Tensor dz = dlogits_of<E, T>(z);
    if (grads.wanted[0]) {
      const Tensor sum = dx_cpu<E, T>(dz, in.weight, sums);
      if (rows.indices.defined()) {
        dx.index_copy_(0, rows.indices.narrow(0, first, count), sum.to(dx.dtype()));
      } else {
        dx.narrow(0, first, count).copy_(sum);
      }
    }
    parameters.add(dz, x.narrow(1, 0, k));
  }
  parameters.finish();
}

}  // namespace

void loss_rows_cpu(const char* op, const LossInputs& in, const LossRows& results,
                   const LossUpstream& upstream, const LossGradients& grads) {
  const TargetRows rows(op, in.x, in.targets, in.weight.size(0), in.options);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, in.x.scalar_type(), "loss", [&] {
    if constexpr (std::is_same_v<scalar_t, c10::BFloat16>) {
      if (has_bf16_brgemm()) {
        return loss_chunks<scalar_t, scalar_t>(rows, in, results, upstream, grads);
      }
    }
    loss_chunks<scalar_t, at::opmath_type<scalar_t>>(rows, in, results, upstream, grads);
  });
}

}  // namespace torchweld
