// The CPU and CUDA implementations of rms_norm, layer_norm, add_rms_norm and add_layer_norm, called
// by layers/norm_op.h.
#pragma once

#include "core/check.h"

namespace torchweld {

// The inputs of a norm. The rows to normalise are x or, if a residual is given, x + residual
// rounded to their dtype.
struct NormInputs {
  bool centred;             // true for LayerNorm, false for RMSNorm
  Tensor x;                 // (..., n)
  OptionalTensor residual;  // the shape of x
  OptionalTensor weight;    // (n,)
  OptionalTensor bias;      // (n,)
  double eps;
  double weight_offset;  // scale = weight + weight_offset
};

// The preallocated outputs of a norm, all contiguous. Outputs that are not requested are undefined.
struct NormResults {
  Tensor y;     // the shape of x
  Tensor sum;   // the shape of x; x + residual of an add_ op
  Tensor mean;  // mean and rstd: the shape of x without its last dim, fp32, or fp64 for fp64 inputs
  Tensor rstd;
};

struct NormUpstream {
  bool centred;
  Tensor dy;              // (..., n)
  Tensor x;               // the rows that the forward normalised
  OptionalTensor weight;  // (n,)
  Tensor mean;            // the shape of x without its last dim; undefined for RMSNorm
  Tensor rstd;
  OptionalTensor dsum;  // the gradient of the stored x + residual, which is added to dx
  double weight_offset;
};

// The preallocated gradients of a norm, all contiguous. Gradients that are not requested have size
// (0,).
struct NormGradients {
  Tensor dx, dweight, dbias;
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
