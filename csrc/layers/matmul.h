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
  Tensor preact = {};    // where defined: receives z = a @ b^T + bias, contiguous
  Tensor row_sums = {};  // where defined: may receive the sums of a's rows, (M,)
};

// What a norm does to a row: (x - mean) * rstd * scale + shift. RMSNorm has mean 0.
struct RowNorm {
  bool centred;
  OptionalTensor scale = std::nullopt;  // (K,)
  OptionalTensor shift = std::nullopt;  // (K,)
};

// Of each row, fp32 (...); RMSNorm has no mean.
struct RowStatistics {
  OptionalTensor mean = std::nullopt;
  OptionalTensor rstd = std::nullopt;
};

// A norm of a's rows in front of the product. out: receives the statistics that it asks for.
struct MatmulNorm {
  RowNorm norm;
  double eps;
  RowStatistics out;
};

// Whether matmul_into takes a norm of a's rows: there are few, short ones.
bool matmul_takes_norm(const Tensor& a, const Tensor& b);

// y = epilogue(a @ b.mT): a (M, K), b (N, K) or (2N, K), y (M, N); or all three with a batch in
// front, where a and b may have a batch of 1. Any strides; empty sizes too. Returns whether
// epilogue.row_sums has the sums of a's rows: no kernel but Hopper's for a weight's gradient makes
// them.
bool matmul_into(const Tensor& y, const Tensor& a, const Tensor& b,
                 const MatmulEpilogue& epilogue = {}, const MatmulNorm* norm = nullptr);

}  // namespace torchweld
