// The interface of the engines of linear_cross_entropy and linear_token_logprobs. An engine loops
// over chunks of rows. For each chunk, it computes the logits and their statistics. If gradients
// are requested, it also computes dlogits and runs two matmuls that read dlogits. The full matrix
// of logits is never in memory.
//
// Every engine has the signature LossEngine. loss_cuda.cpp chooses an engine on CUDA.
#pragma once

#include "losses/options.h"

namespace torchweld {

enum class LossKind { kCrossEntropy, kLogprob };

struct LossInputs {
  LossKind kind;
  Tensor x;             // (..., K)
  Tensor weight;        // (N, K)
  OptionalTensor bias;  // (N,)
  Tensor target;        // (...), the tensor that the caller passed
  LossOptions options;
  Tensor targets = target_of_rows(target, options);  // (rows,) int64
};

// The results of a loss. Each tensor has one element per row of x, in the accumulation dtype. The
// engine does not write the elements of ignored rows.
struct LossRows {
  Tensor loss;       // the loss or log-probability; if undefined, lse and entropy are inputs
  Tensor lse;        // logsumexp of the scaled logits
  Tensor entropy;    // undefined if not requested
  Tensor mean = {};  // mean of the scaled logits; undefined if not requested
};

// The gradients with respect to the tensors of LossRows. dloss may have stride 0. If the call must
// not compute gradients, all of these tensors are undefined.
struct LossUpstream {
  Tensor dloss;
  Tensor dentropy;  // if undefined, the gradient is 0
  // The gradient with respect to LossRows::lse. Only a cross entropy may have this gradient. If
  // undefined, the gradient is 0.
  Tensor dlse = {};
  // The gradient with respect to LossRows::mean. Only a cross entropy may have this gradient. If
  // undefined, the gradient is 0.
  Tensor dmean = {};
};

// The gradients that an engine computes. dx is contiguous. A tensor of size (0,) stands for a
// gradient that the caller did not request.
struct LossGradients {
  Tensor dx, dweight, dbias;
  std::array<bool, 3> wanted;

  bool any() const { return wanted[0] || wanted[1] || wanted[2]; }
};

using LossEngine = void (*)(const char* op, const LossInputs& in, const LossRows& results,
                            const LossUpstream& upstream, const LossGradients& grads);

void loss_rows_cpu(const char* op, const LossInputs& in, const LossRows& results,
                   const LossUpstream& upstream, const LossGradients& grads);
#ifdef TORCHWELD_CUDA
void loss_rows_cuda(const char* op, const LossInputs& in, const LossRows& results,
                    const LossUpstream& upstream, const LossGradients& grads);
#endif

inline LossGradients no_loss_gradients() { return {{}, {}, {}, {false, false, false}}; }

// Allocates the gradients of a backward op without initialising them.
inline LossGradients empty_loss_gradients(const Tensor& x, const Tensor& weight,
                                          const std::array<bool, 3>& wanted) {
  return {empty_input_grad(x, wanted[0]), empty_weight_grad(weight, wanted[1]),
          empty_vector_grad(weight, weight.sym_size(0), wanted[2]), wanted};
}

}  // namespace torchweld
