// A loss engine that runs only three matmuls, because the forward stores exponentials. The forward
// writes y = 2^(l - k) in place of the logits, with l = log2(e) * z and one integer k per row. The
// gradient of a row's logits is factor * y, with one factor per row; the forward changes y at the
// target so that this holds there too. The backward is therefore two matmuls of y: dx = factor * (y
// @ weight) and dweight = y^T @ (factor * x).
//
// No kernel reads y between the matmuls. On an H100 in bf16, forward and backward together take
// 1.05 times as long as three plain matmuls for (M, K, N) = (8192, 2048, 128256), and 1.02 times as
// long for (8192, 4096, 151936).
//
// Source: quack (linear_cross_entropy.py) stores exponentials in place of the logits, with a k for
// each tile, and rescales the operand in registers. Here one k per row leaves plain matmuls. bf16
// can hold 2^(l - k) if k is within 100 of the row's largest l. The target's l is known before the
// matmul and nearly always close enough to choose k from. In other rows, a kernel rescales y in
// memory.
#pragma once

#include <vector>

#include "losses/loss.h"

namespace torchweld {

struct Exponentials {
  Tensor y;       // (..., N rounded up to 64) in the dtype of x; the columns behind N are 0
  Tensor factor;  // (...) in the accumulation dtype; 0 for an ignored row

  // Returns y as (rows, N rounded up to 64) and factor as (rows,), both contiguous.
  Exponentials rows(int64_t count) const {
    return {y.contiguous().view({count, y.size(-1)}), factor.contiguous().view({count})};
  }
};

// Returns true if the Hopper kernels support this loss. Torch ops compute all other losses. The
// function reads shapes and dtypes only, no data.
bool has_exponentials_kernels(const Tensor& x, const Tensor& weight, const LossOptions& options);

std::vector<c10::SymInt> exponentials_sizes(const Tensor& x, const Tensor& weight);
Exponentials empty_exponentials(const Tensor& x, const Tensor& weight);

// Computes the losses and the lse, and writes y and factor. label_smoothing must be 0.
void exponentials_forward(const LossInputs& in, const LossRows& results, const Exponentials& kept);
void exponentials_backward(const Exponentials& kept, const Tensor& dloss, const Tensor& x,
                           const Tensor& weight, const LossGradients& grads);

#ifdef TORCHWELD_CUDA
// The Hopper kernels of the forward. Call it only if has_exponentials_kernels is true. If
// results.entropy is defined, the function also computes the entropies. If `kept` is nullptr, it
// does not store y.
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
