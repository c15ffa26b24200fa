// The engines of linear_cross_entropy and linear_token_logprobs. An engine computes the logits of a
// chunk of rows, their statistics, and with gradients dlogits and its two products; the logits are
// never whole in memory.
//
// A further engine, such as Hopper's, has this signature; loss_cuda.cpp chooses between engines.
#pragma once

#include "losses/options.h"

namespace torchweld {

enum class LossKind { kCrossEntropy, kLogprob };

struct LossInputs {
  LossKind kind;
  Tensor x;             // (..., K)
  Tensor weight;        // (N, K)
  OptionalTensor bias;  // (N,)
  Tensor target;        // (...), as the caller gave it
  LossOptions options;
  Tensor targets = target_of_rows(target, options);  // (rows,) int64
};

// Vectors over all rows of x, in the dtype of sums. A row that is ignored stays as it is.
struct LossRows {
  Tensor loss;     // loss or log-probability; undefined: lse and entropy are given, not computed
  Tensor lse;      // logsumexp of the scaled logits
  Tensor entropy;  // undefined where it isn't asked for
};

// Gradients of LossRows; dloss may have stride 0. Undefined where no gradients are wanted.
struct LossUpstream {
  Tensor dloss;
  Tensor dentropy;   // undefined: 0
  Tensor dlse = {};  // undefined: 0; only of a cross entropy
};

// The gradients of a call, contiguous dx; those that are not wanted are (0,).
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

// The gradients of a backward op, not yet filled.
inline LossGradients empty_loss_gradients(const Tensor& x, const Tensor& weight,
                                          const std::array<bool, 3>& wanted) {
  return {empty_input_grad(x, wanted[0]), empty_weight_grad(weight, wanted[1]),
          empty_vector_grad(weight, weight.sym_size(0), wanted[2]), wanted};
}

}  // namespace torchweld
