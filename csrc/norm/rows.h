// The engines of rms_norm, layer_norm and their add_ ops (layers/norm_op.h).
#pragma once

#include "core/check.h"

namespace torchweld {

// The rows are x, or where there is a residual x + residual, rounded to their dtype.
struct NormInputs {
  bool centred;             // LayerNorm
  Tensor x;                 // (..., n)
  OptionalTensor residual;  // like x
  OptionalTensor weight;    // (n,)
  OptionalTensor bias;      // (n,)
  double eps;
  double weight_offset;  // scale = weight + weight_offset
};

// Contiguous but for their statistics' shape; undefined ones are not requested.
struct NormResults {
  Tensor y;     // x's shape
  Tensor sum;   // x's shape: the rows of an add_ op
  Tensor mean;  // (...), fp32 or fp64
  Tensor rstd;
};

struct NormUpstream {
  bool centred;
  Tensor dy;              // (..., n)
  Tensor x;               // the rows that were normalised
  OptionalTensor weight;  // (n,)
  Tensor mean;            // (...); undefined: RMSNorm
  Tensor rstd;
  OptionalTensor dsum;  // a gradient to add to dx
  double weight_offset;
};

// Contiguous; those of size (0,) are not requested.
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
