// The loss engine that stores exponentials (losses/exponentials.h). This file decides whether the
// Hopper kernels support a loss. It computes all other losses with torch ops.
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <limits>

#include "core/device.h"
#include "core/observe.h"
#include "losses/exponentials.h"

namespace torchweld {

bool has_exponentials_kernels(const Tensor& x, const Tensor& weight, const LossOptions& options) {
#ifdef TORCHWELD_CUDA
  const DeviceFacts device = device_facts();
  const auto k = weight.sym_size(1).maybe_as_int();
  return (x.is_cuda() || is_dry_run()) && device.wgmma && device.tma &&
         x.scalar_type() == at::kBFloat16 && !(options.needs_mean() && options.softcap) && k &&
         *k > 0 && *k % 8 == 0;
#else
  return false;
#endif
}

// Returns the sizes of y. The number of columns is rounded up to a multiple of 64, so that every
// row of y starts on a 128-byte boundary.
std::vector<c10::SymInt> exponentials_sizes(const Tensor& x, const Tensor& weight) {
  constexpr int64_t kMultiple = 64;
  std::vector<c10::SymInt> sizes = without_last(x);
  sizes.push_back((weight.sym_size(0) + (kMultiple - 1)) / c10::SymInt(kMultiple) * kMultiple);
  return sizes;
}

Exponentials empty_exponentials(const Tensor& x, const Tensor& weight) {
  return {at::empty_symint(exponentials_sizes(x, weight), x.options()),
          empty_per_token(x, without_last(x))};
}

void exponentials_forward(const LossInputs& in, const LossRows& results, const Exponentials& kept) {
#ifdef TORCHWELD_CUDA
  if (in.targets.numel() > 0 && has_exponentials_kernels(in.x, in.weight, in.options)) {
    return exponentials_forward_sm90(in, results, &kept);
  }
#endif
  const auto acc = acc_dtype(in.x);
  const auto wide = [&](const Tensor& t) { return t.to(acc); };
  const int64_t n = in.weight.size(0);
  const Tensor live = in.targets.ne(in.options.ignore_index.value());
  if (in.x.is_cpu()) check_targets("linear_cross_entropy", in.targets, n, in.options);
  Tensor z = at::linear(wide(as_matrix(in.x)), wide(in.weight),
                        is_given(in.bias) ? wide(*in.bias) : Tensor());
  Tensor slope;  // the derivative of z with respect to the logit
  if (in.options.softcap) {
    const Tensor tanh = (z / *in.options.softcap).tanh_();
    slope = (1 - tanh * tanh).div_(in.options.temperature);
    z = tanh * (*in.options.softcap / in.options.temperature);
  } else {
    z.div_(in.options.temperature);
  }
  const Tensor lse = at::logsumexp(z, {1});
  const Tensor target = in.targets.masked_fill(live.logical_not(), 0).unsqueeze(1);
  const Tensor z_target = z.gather(1, target).squeeze(1);
  const double eps = in.options.label_smoothing;
  Tensor loss = lse - (1 - eps) * z_target + in.options.z_loss * lse * lse;
  if (eps != 0) loss.sub_(z.mean(1), eps);
  const auto store = [&](const Tensor& to, const Tensor& from) {
    to.copy_(at::where(live, from, at::zeros({}, from.options())));
  };
  store(results.loss, loss);
  store(results.lse, lse);
  if (results.mean.defined()) store(results.mean, z.mean(1));
  // This function uses the lse of the row as k. Then y is the softmax, and factor is the derivative
  // of the loss with respect to the lse.
  // NOTE: if all logits of a row are -inf, the row's probabilities factor * y must be NaN.
  // Therefore factor is NaN for such a row, and y is 0 except at the target.
  const Tensor impossible = lse.eq(-std::numeric_limits<double>::infinity());
  Tensor y = (z - lse.masked_fill(impossible, 0).unsqueeze(1)).exp_();
  Tensor lse_slope = 1 + 2 * in.options.z_loss * lse;
  constexpr double kTiny = 1e-10;  // the minimum of |lse_slope|, because y is divided by lse_slope
  lse_slope.masked_fill_(lse_slope.abs().lt(kTiny), kTiny);
  lse_slope.masked_fill_(impossible, std::numeric_limits<double>::quiet_NaN());
  y.scatter_add_(1, target, -lse_slope.reciprocal().mul_(1 - eps).unsqueeze(1));
  if (slope.defined()) {
    y.mul_(slope);
  } else {
    y.div_(in.options.temperature);
  }
  store(kept.factor, lse_slope);
  kept.y.zero_();
  kept.y.narrow(1, 0, n).copy_(at::where(live.unsqueeze(1), y, at::zeros({}, y.options())));
}

void exponentials_backward(const Exponentials& kept, const Tensor& dloss, const Tensor& x,
                           const Tensor& weight, double uniform, const LossGradients& grads) {
#ifdef TORCHWELD_CUDA
  if (kept.y.numel() > 0 && has_exponentials_kernels(x, weight, {})) {
    return exponentials_backward_sm90(kept, dloss, x, weight, uniform, grads);
  }
#endif
  const auto acc = acc_dtype(x);
  const Tensor live = kept.factor.ne(0).unsqueeze(1);
  const Tensor factor = (kept.factor * dloss).unsqueeze(1);
  const Tensor y = kept.y.narrow(1, 0, weight.size(0)).to(acc);
  const auto scaled = [&](const Tensor& rows) {
    return at::where(live, factor * rows, at::zeros({}, rows.options()));
  };
  // The uniform term of the gradient, one value for each row. The value of an ignored row is 0.
  const Tensor each =
      at::where(live, dloss.unsqueeze(1) * -uniform, at::zeros({}, dloss.options()));
  if (grads.wanted[0]) {
    Tensor dx = scaled(at::mm(y, weight.to(acc)));
    if (uniform != 0) dx.add_(each * weight.sum(0, /*keepdim=*/true, acc));
    grads.dx.copy_(dx.view(grads.dx.sizes()));
  }
  if (grads.wanted[1]) {
    const Tensor rows = as_matrix(x).to(acc);
    Tensor dweight = at::mm(y.t(), scaled(rows));
    if (uniform != 0) {
      dweight.add_((each * at::where(live, rows, at::zeros({}, rows.options()))).sum(0));
    }
    grads.dweight.copy_(dweight);
  }
  if (grads.wanted[2]) {
    const Tensor dbias = scaled(y).sum(0);
    grads.dbias.copy_(uniform == 0 ? dbias : dbias + each.sum());
  }
}

}  // namespace torchweld
