// The CUDA engines of linear_cross_entropy and linear_token_logprobs. This file contains the engine
// that runs on every GPU. It also chooses between this engine and the Hopper engine.
//
// The engine for every GPU loops over chunks of rows. A matmul computes the chunk's logits in fp32.
// The kernels of kernels.cu compute the statistics and overwrite the logits with dlogits. Two
// matmuls then compute the gradients from dlogits.
#ifdef TORCHWELD_CUDA

#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "core/batch_invariance.h"
#include "core/cuda_inputs.h"
#include "layers/matmul.h"
#include "losses/exponentials.h"
#include "losses/loss.h"
#include "losses/params.h"
#include "losses/wide_product.h"

namespace torchweld {
namespace {

// Computes logits = x @ weight^T in fp32.
// NOTE: the sums of torch's matmul may depend on the number of rows.
void logits_into(Tensor& logits, const Tensor& x, const Tensor& weight) {
  if (x.scalar_type() == at::kFloat || is_batch_invariant()) {
    matmul_into(logits, x.to(at::kFloat), weight.to(at::kFloat));
  } else {
    wide_product_into(logits, x, weight.t());
  }
}

// Computes to = a @ b. The product is rounded only once, to the dtype of `to`.
void product_into(Tensor& to, const Tensor& a, const Tensor& b) {
  // NOTE: matmul_into would copy `a` if the size of a row of `a` is not a multiple of 16 bytes.
  if (a.size(1) * a.element_size() % 16 == 0) {
    matmul_into(to, a, Matrix(b).t());
  } else {
    at::mm_out(to, a, b);
  }
}

// Accumulates the gradient of the weight over all chunks, in fp32.
class WeightGradient {
 public:
  WeightGradient(const Tensor& dweight, bool wanted, bool one_chunk) : dweight_(dweight) {
    if (!wanted) return;
    const bool direct = one_chunk || dweight.scalar_type() == at::kFloat;
    sum_ = direct ? dweight : at::empty(dweight.sizes(), dweight.options().dtype(at::kFloat));
  }

  // Adds dz^T @ x of one chunk to the gradient.
  void add(const Tensor& dz, const Tensor& x) {
    if (!sum_.defined()) return;
    if (dz.scalar_type() != sum_.scalar_type()) {
      wide_product_into(sum_, dz.t(), x, /*add=*/started_);
    } else if (!started_) {
      matmul_into(sum_, Matrix(dz).t(), Matrix(x).t());
    } else {
      at::addmm_out(sum_, sum_, dz.t(), x);
    }
    started_ = true;
  }

  void finish() {
    if (!sum_.defined()) return;
    if (!started_) sum_.zero_();
    if (!sum_.is_same(dweight_)) dweight_.copy_(sum_);
  }

 private:
  Tensor dweight_, sum_;
  bool started_ = false;
};

template <typename T = float>
T* optional_data(const Tensor& t) {
  return t.defined() ? mutable_data<T>(t) : nullptr;
}

void loss_rows_any_gpu(const LossInputs& in, const LossRows& results, const LossUpstream& upstream,
                       const LossGradients& grads) {
  const int64_t rows = in.targets.numel(), n = in.weight.size(0), k = in.weight.size(1);
  const cudaStream_t stream = current_stream();
  const Tensor x = as_matrix(in.x);
  const Vector bias(in.bias);
  // Each row of the logits is padded to a multiple of 8 elements, so that it starts on a 16-byte
  // boundary. The fp32 logits and the 16-bit dlogits in the same memory both need this.
  const int64_t row_stride = divide_up(n, 8) * 8;
  const int64_t chunk = rows == 0 ? 1 : loss_chunk_rows(rows, row_stride, sizeof(float));
  WeightGradient dweight(grads.dweight, grads.wanted[1], rows <= chunk);
  Tensor dx, dbias;
  if (grads.wanted[0]) dx = grads.dx.view({rows, k});
  if (grads.wanted[2]) dbias = at::zeros({n}, results.lse.options());
  const Tensor buffer = at::empty({std::min(chunk, rows), row_stride}, results.lse.options());
  for (int64_t first = 0; first < rows; first += chunk) {
    const int64_t count = std::min(chunk, rows - first);
    Tensor logits = buffer.narrow(0, 0, count).narrow(1, 0, n);
    const Tensor targets = in.targets.narrow(0, first, count);
    Tensor x_rows = x.narrow(0, first, count), live;
    if (in.options.ignore_index) {
      // NOTE: ignored rows of x are replaced by zeros. Otherwise an inf or NaN in an ignored row
      // would make dweight NaN, because 0 * NaN is NaN.
      live = targets.ne(*in.options.ignore_index).unsqueeze(1);
      x_rows = at::where(live, x_rows, at::zeros({}, x.options()));
    }
    logits_into(logits, x_rows, in.weight);
    const auto from_first = [&](const Tensor& t) {
      return t.defined() ? t.narrow(0, first, count) : t;
    };
    const LossChunk params = {mutable_data<float>(logits),
                              row_stride,
                              count,
                              n,
                              bias.data(),
                              dtype_of(in.x),
                              const_data<int64_t>(targets),
                              in.options.ignore_index.has_value(),
                              in.options.ignore_index.value_or(0),
                              in.kind == LossKind::kCrossEntropy,
                              in.options.logit_scale<float>(),
                              in.options.terms<float>(),
                              optional_data(from_first(results.loss)),
                              optional_data(from_first(results.lse)),
                              optional_data(from_first(results.entropy)),
                              optional_data(from_first(results.mean))};
    if (results.loss.defined()) launch_loss_statistics(params, stream);
    if (!grads.any()) continue;
    const Tensor dloss = from_first(upstream.dloss);
    const auto optional_gradient = [&](const Tensor& t) {
      return t.defined() ? const_data<float>(from_first(t)) : nullptr;
    };
    launch_loss_gradient(
        {params, const_data<float>(dloss), dloss.stride(0), optional_gradient(upstream.dentropy),
         optional_gradient(upstream.dlse), optional_gradient(upstream.dmean)},
        stream);
    const int64_t halves = static_cast<int64_t>(sizeof(float)) / in.x.element_size();
    const Tensor dz =
        buffer.view(in.x.scalar_type()).as_strided({count, n}, {row_stride * halves, 1});
    if (grads.wanted[0]) {
      Tensor dx_rows = dx.narrow(0, first, count);
      product_into(dx_rows, dz, in.weight);
      if (live.defined()) dx_rows.masked_fill_(live.logical_not(), 0);
    }
    dweight.add(dz, x_rows);
    if (grads.wanted[2]) dbias.add_(dz.sum(0, /*keepdim=*/false, at::kFloat));
  }
  dweight.finish();
  if (grads.wanted[2]) grads.dbias.copy_(dbias);
}

}  // namespace

void loss_rows_cuda(const char*, const LossInputs& in, const LossRows& results,
                    const LossUpstream& upstream, const LossGradients& grads) {
  const OnDevice on(in.x.device());
  const bool exponentials = in.targets.numel() > 0 && in.weight.size(0) > 0 &&
                            has_exponentials_kernels(in.x, in.weight, in.options);
  if (exponentials && !grads.any()) return exponentials_forward_sm90(in, results, nullptr);
  // exponentials_recompute_sm90 can compute a gradient only if it is the exponentials times one
  // factor per row. The gradient of an entropy is not of this form.
  if (exponentials && !results.loss.defined() && !upstream.dentropy.defined()) {
    const bool negative = in.kind == LossKind::kLogprob;
    const Tensor dloss = negative ? -upstream.dloss : upstream.dloss;
    return exponentials_recompute_sm90(in, results.lse, {dloss, {}, upstream.dlse, upstream.dmean},
                                       grads);
  }
  loss_rows_any_gpu(in, results, upstream, grads);
}

}  // namespace torchweld

#endif
