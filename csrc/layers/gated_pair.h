// Helpers of gated_linear_pair and gated_mlp. Two linear layers with weights of their own compute
// the left and the right half of z (..., 2N). A gate combines the halves (layers/gate.h).
//   x (..., K), weights left and right (N, K), left_bias and right_bias (N,)
#pragma once

#include <ATen/ops/cat.h>
#include <ATen/ops/zeros_like.h>

#include "layers/donation.h"
#include "layers/gate.h"

namespace torchweld {

// Checks x, the weights `left` and `right`, and the gate. Returns the sizes of the gate's result.
inline std::vector<c10::SymInt> check_pair(const char* op, const Tensor& x, const Tensor& left,
                                           const Tensor& right, c10::string_view gate) {
  auto sizes = check_linear(op, x, "left", left, std::nullopt);
  check_linear(op, x, "right", right, std::nullopt);
  check_shape(op, "right", right, left.sym_sizes(), "left's shape");
  parse_gate(op, gate);
  return sizes;
}

inline void check_pair_biases(const char* op, const OptionalTensor& left_bias,
                              const OptionalTensor& right_bias, const Tensor& left,
                              const Tensor& x) {
  check_vector(op, "left_bias", left_bias, left.sym_size(0), "(N,)", x);
  check_vector(op, "right_bias", right_bias, left.sym_size(0), "(N,)", x);
}

// CPU: returns the result of the left matmul and the result of the right matmul, both (rows, N).
inline Halves pair_branches(const Tensor& x, const Tensor& left, const Tensor& right,
                            const OptionalTensor& left_bias, const OptionalTensor& right_bias) {
  const Tensor rows = as_matrix(x);
  const auto branch = [&](const Tensor& weight, const OptionalTensor& bias) {
    Tensor z = at::empty({rows.size(0), weight.size(0)}, x.options());
    linear_into(z, rows, weight, bias);
    return z;
  };
  return {branch(left, left_bias), branch(right, right_bias)};
}

// CPU: saves the halves in z (..., 2N).
inline void save_halves(const Tensor& z, const Halves& halves) {
  const Halves saved(as_matrix(z), /*interleaved=*/false);
  saved.left.copy_(halves.left);
  saved.right.copy_(halves.right);
}

// CPU: computes to += a @ b.
// NOTE: for float32, the code calls matmul_into_cpu and then adds. matmul_into_cpu uses oneDNN,
// which is twice as fast as addmm_, but can't add to an existing matrix.
inline void add_matmul_cpu(Tensor& to, const Tensor& a, const Tensor& b) {
  if (is_batch_invariant()) {
    to.add_(invariant_product(a, b));
    return;
  }
  if (to.scalar_type() != at::kFloat) {
    to.addmm_(a, b);
    return;
  }
  Tensor product = at::empty_like(to);
  matmul_into_cpu(product, a, b);
  to.add_(product);
}

// CPU: computes the gradients of the pair from dz. `wanted` says which of dx, dleft, dright,
// dleft_bias and dright_bias are computed.
inline void pair_backward_cpu(Tensor& dx, Tensor& dleft, Tensor& dright, Tensor& dleft_bias,
                              Tensor& dright_bias, const std::array<bool, 5>& wanted,
                              const Halves& dz, const Tensor& x, const Tensor& left,
                              const Tensor& right) {
  const Tensor rows = as_matrix(x);
  linear_backward_into(dx, dleft, dleft_bias, {wanted[0], wanted[1], wanted[3]}, dz.left, rows,
                       left);
  linear_backward_into(dx, dright, dright_bias, {false, wanted[2], wanted[4]}, dz.right, rows,
                       right);
  if (wanted[0]) {
    Tensor out = as_matrix(dx);
    add_matmul_cpu(out, dz.right, right);
  }
}

#ifdef TORCHWELD_CUDA
// Computes y, the gate of the left and the right half of z. Stores z too, if the tensor z is
// defined.
inline void pair_matmul_into(const Tensor& y, const Tensor& z, const Tensor& x, const Tensor& left,
                             const Tensor& right, const OptionalTensor& left_bias,
                             const OptionalTensor& right_bias, Gate gate) {
  OptionalTensor bias;
  if (is_given(left_bias) || is_given(right_bias)) {
    const Tensor& like = is_given(left_bias) ? *left_bias : *right_bias;
    const auto values = [&](const OptionalTensor& t) {
      return is_given(t) ? *t : at::zeros_like(like);
    };
    bias = at::cat({values(left_bias), values(right_bias)});
  }
  gated_matmul_into(y, z, x, Matrix::pair_of(left, right), bias, gate, /*interleaved=*/false);
}

// Computes the gradients of the pair from dz (rows, 2N). A gradient that is passed as a tensor of
// size (0,) is not computed.
inline void pair_backward_into(const Tensor& dx, const Tensor& dleft, const Tensor& dright,
                               const Tensor& dleft_bias, const Tensor& dright_bias,
                               const std::array<bool, 3>& wanted, const Tensor& dz, const Tensor& x,
                               const Tensor& left, const Tensor& right) {
  if (wanted[0]) {
    const CallScope part("dx");
    matmul_into(rows_of(dx), dz, Matrix::pair_of(left, right).t());
  }
  const int64_t n = left.size(0);
  const Matrix rows = rows_of(x);
  if (wanted[1]) weight_backward_into(dleft, dleft_bias, dz.narrow(1, 0, n), rows, "dleft");
  if (wanted[2]) weight_backward_into(dright, dright_bias, dz.narrow(1, n, n), rows, "dright");
}
#endif

}  // namespace torchweld
