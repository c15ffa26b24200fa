// The interface of the CPU and CUDA implementations of rms_norm, layer_norm, add_rms_norm,
// add_layer_norm and rms_norm_gated. layers/norm_op.h and ops/rms_norm_gated call them.
#pragma once

#include "core/check.h"

namespace torchweld {

// The inputs of a norm. If no residual is given, the rows of x are normalised. If a residual is
// given, the rows of x + residual, rounded to the dtype of x, are normalised.
struct NormInputs {
  bool centred;             // true for LayerNorm, false for RMSNorm
  Tensor x;                 // (..., n)
  OptionalTensor residual;  // has the shape of x
  OptionalTensor weight;    // (n,)
  OptionalTensor bias;      // (n,)
  double eps;
  double weight_offset;  // scale = weight + weight_offset
  // For RMSNorm: the rstd that an earlier call has computed. If undefined, this call computes the
  // rstd. Only the CPU implementation supports a saved_rstd.
  Tensor saved_rstd;
  // For rms_norm_gated: silu(gate) multiplies the normalised rows or, if gate_first, the rows of x.
  OptionalTensor gate = std::nullopt;  // has the shape of x
  bool gate_first = false;
};

// The outputs of a norm. The caller allocates them as contiguous tensors. An undefined tensor
// stands for an output that the caller did not request.
struct NormResults {
  Tensor y;     // has the shape of x
  Tensor sum;   // x + residual, with the shape of x; only the add_ ops return it
  Tensor mean;  // mean and rstd: x's shape without the last dim; fp32, or fp64 for fp64 inputs
  Tensor rstd;
};

struct NormUpstream {
  bool centred;
  Tensor dy;              // (..., n)
  Tensor x;               // the rows that the forward has normalised
  OptionalTensor weight;  // (n,)
  Tensor mean;            // the shape of x without its last dim; undefined for RMSNorm
  Tensor rstd;
  OptionalTensor dsum;  // the gradient with respect to the stored x + residual; added to dx
  double weight_offset;
  OptionalTensor gate = std::nullopt;  // as in NormInputs
  bool gate_first = false;
};

// The gradients of a norm. The caller allocates them as contiguous tensors. A tensor of size (0,)
// stands for a gradient that the caller did not request.
struct NormGradients {
  Tensor dx, dweight, dbias;
  Tensor dgate = {};
};

using NormForwardEngine = void (*)(const NormInputs& in, const NormResults& out);
using NormBackwardEngine = void (*)(const NormUpstream& in, const NormGradients& out);

void norm_forward_cpu(const NormInputs& in, const NormResults& out);
void norm_backward_cpu(const NormUpstream& in, const NormGradients& out);
#ifdef TORCHWELD_CUDA
void norm_forward_cuda(const NormInputs& in, const NormResults& out);
void norm_backward_cuda(const NormUpstream& in, const NormGradients& out);
#endif

}  // namespace torchweld
