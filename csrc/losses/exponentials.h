// A loss engine that runs only three matmuls, because the forward stores exponentials instead of
// the logits. z are the logits after softcap and temperature:
//   y = 2^(l - k),  l = log2(e) * z,  k is one integer per row
//   gradient with respect to the logits = factor * y,  factor is one number per row
// The forward modifies y at the target, so that factor * y is the gradient at the target, too. The
// backward runs two matmuls of y:
//   dx = factor * (y @ weight),  dweight = y^T @ (factor * x)
//
// No kernel reads all of y between the matmuls. On an H100 in bf16, forward and backward together
// need 1.05 times the time of three plain matmuls for (M, K, N) = (8192, 2048, 128256), and 1.02
// times their time for (8192, 4096, 151936).
//
// Source: quack (linear_cross_entropy.py) stores exponentials instead of the logits, with one k per
// tile, so its backward must rescale the operand in registers. Here there is one k per row, so the
// backward runs plain matmuls. bf16 can represent 2^(l - k) if k is within 100 of the row's largest
// l. k is derived from the target's l, which is computed before the matmul. This k is nearly always
// close enough to the largest l. If this k is not close enough, a kernel rescales the row of y in
// memory.
#pragma once

#include <algorithm>
#include <vector>

#include "losses/loss.h"

namespace torchweld {

// With label smoothing, the gradient has one more term, -uniform * dloss, which is the same for all
// logits of a row. factor * y does not contain this term. For this term, the backward adds to each
// row of dx a multiple of sum(rows of `weight`), and to all rows of dweight one vector. In the
// forward, the mean of a row's logits is x @ mean(rows of `weight`) + mean(bias). With a softcap,
// the mean would not have this form. Therefore a call that needs the mean must not have a softcap.
struct Exponentials {
  Tensor y;       // (..., N rounded up to a multiple of 64), in x's dtype; columns from N on are 0
  Tensor factor;  // (...), in the accumulation dtype; 0 for an ignored row

  // Returns y as (`count`, columns of y) and factor as (`count`,). Both are contiguous.
  Exponentials rows(int64_t count) const {
    return {y.contiguous().view({count, y.size(-1)}), factor.contiguous().view({count})};
  }
};

// Returns true if the Hopper kernels support this loss. Torch ops compute all other losses. The
// function reads only the shapes and the dtypes of the tensors, not their values.
bool has_exponentials_kernels(const Tensor& x, const Tensor& weight, const LossOptions& options);

std::vector<c10::SymInt> exponentials_sizes(const Tensor& x, const Tensor& weight);
Exponentials empty_exponentials(const Tensor& x, const Tensor& weight);

// Returns `uniform`. With label smoothing, the gradient with respect to every logit has a term
// -uniform * dloss.
inline double uniform_gradient(const LossOptions& options, int64_t n) {
  return options.label_smoothing /
         (static_cast<double>(std::max<int64_t>(n, 1)) * options.temperature);
}

// Computes the loss and the lse of every row, and stores y and factor in `kept`. If
// options.needs_mean() is true, there must be no softcap.
void exponentials_forward(const LossInputs& in, const LossRows& results, const Exponentials& kept);
void exponentials_backward(const Exponentials& kept, const Tensor& dloss, const Tensor& x,
                           const Tensor& weight, double uniform, const LossGradients& grads);

#ifdef TORCHWELD_CUDA
// Runs the forward on the Hopper kernels. has_exponentials_kernels must return true for the loss.
// Also computes the entropies if results.entropy is defined. If `kept` is nullptr, the function
// does not store y and factor.
void exponentials_forward_sm90(const LossInputs& in, const LossRows& results,
                               const Exponentials* kept);
void exponentials_backward_sm90(const Exponentials& kept, const Tensor& dloss, const Tensor& x,
                                const Tensor& weight, double uniform, const LossGradients& grads);
// Computes the gradients for a forward that has stored the lse, but not y. The function computes y
// again, for some columns of the logits at a time. upstream.dentropy must be undefined.
void exponentials_recompute_sm90(const LossInputs& in, const Tensor& lse,
                                 const LossUpstream& upstream, const LossGradients& grads);
#endif

}  // namespace torchweld
