// From tensors to the matmul engine. Host code of CUDA builds only.
#pragma once

#include "core/check.h"
#include "core/pointwise.h"

namespace torchweld {

// True where torch's own switch lets fp32 matmuls round their operands to TF32.
bool matmul_may_use_tf32(const Tensor& t);

struct MatmulEpilogue {
  OptionalTensor bias = std::nullopt;  // (N,), (2N,) where gated; the operands' dtype, or fp32
  Activation activation = Activation::kNone;
  bool gated = false;  // y (M, N) = gate(left, right) of z (M, 2N)
  Gate gate = Gate::kSigmoidTanh;
  bool interleaved = false;
  Tensor preact = {};  // where defined: receives z = a @ b^T + bias, contiguous
};

// y = epilogue(a @ b.mT): a (M, K), b (N, K) or (2N, K), y (M, N); or all three with a batch in
// front, where a and b may have a batch of 1. Any strides; empty sizes too.
void matmul_into(const Tensor& y, const Tensor& a, const Tensor& b,
                 const MatmulEpilogue& epilogue = {});

}  // namespace torchweld
