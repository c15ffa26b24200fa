// The engine that keeps exponentials: three products. Forward stores y = 2^(l - k) in
// place of the logits, with l = log2(e) * z and an integer k of each row. The gradient of a row's
// logits is a factor times y, but at the target, where forward changes y. So backward is two
// products of y: dx = factor * (y @ weight), dweight = y^T @ (factor * x).
//
// Nothing reads y between the products. On an H100, bf16, forward and backward run in 1.05 of the
// time of three bare products at (8192, 2048, 128256), in 1.02 at (8192, 4096, 151936).
//
// Source: exponentials in place of the logits are quack's (linear_cross_entropy.py), which has a k
// for each tile and rescales the operand in registers. One k for a row leaves plain products. bf16
// holds 2^(l - k) where k is within 100 of the largest l, so the target's l, which is known before
// the product, nearly always serves. Other rows are rescaled in memory.
#pragma once

#include <vector>

#include "losses/loss.h"

namespace torchweld {

struct Exponentials {
  Tensor y;       // (..., N filled up to 64), of x's dtype; zeros behind N
  Tensor factor;  // (...) in the dtype of sums; 0 where a row is ignored

  // (rows, N filled up to 64) and (rows,), contiguous.
  Exponentials rows(int64_t count) const {
    return {y.contiguous().view({count, y.size(-1)}), factor.contiguous().view({count})};
  }
};

// Whether Hopper's kernels support a loss; torch's ops compute the others. Reads no data.
bool has_exponentials_kernels(const Tensor& x, const Tensor& weight, const LossOptions& options);

std::vector<c10::SymInt> exponentials_sizes(const Tensor& x, const Tensor& weight);
Exponentials empty_exponentials(const Tensor& x, const Tensor& weight);

// Computes losses and lse, and fills the rows of y and factor. label_smoothing is 0.
void exponentials_forward(const LossInputs& in, const LossRows& results, const Exponentials& kept);
void exponentials_backward(const Exponentials& kept, const Tensor& dloss, const Tensor& x,
                           const Tensor& weight, const LossGradients& grads);

#ifdef TORCHWELD_CUDA
// For losses with kernels alone. Also computes entropies where results has them; `kept` may be
// nullptr.
void exponentials_forward_sm90(const LossInputs& in, const LossRows& results,
                               const Exponentials* kept);
void exponentials_backward_sm90(const Exponentials& kept, const Tensor& dloss, const Tensor& x,
                                const Tensor& weight, const LossGradients& grads);
// The gradients from the lse alone: computes y again, some columns at a time. dlse may be
// undefined.
void exponentials_recompute_sm90(const LossInputs& in, const Tensor& lse, const Tensor& dloss,
                                 const Tensor& dlse, const LossGradients& grads);
#endif

}  // namespace torchweld
