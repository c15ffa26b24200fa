// Helpers of gated_linear and gated_linear_pair. Two linear layers compute the left and the right
// half of z (..., 2N). A gate combines the halves: y (..., N) = gate(left, right).
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/sigmoid_backward.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/tanh_backward.h>

#include <utility>

#include "core/check.h"
#include "layers/linear_cpu.h"
#include "layers/swiglu_cpu.h"

#ifdef TORCHWELD_CUDA
#include "layers/norm_linear.h"
#endif

namespace torchweld {

inline Gate parse_gate(const char* op, std::string_view name) {
  if (name == "sigmoid_tanh") return Gate::kSigmoidTanh;
  if (name == "geglu") return Gate::kGeglu;
  if (name == "geglu_tanh") return Gate::kGegluTanh;
  if (name == "swiglu") return Gate::kSwiglu;
  if (name == "reglu") return Gate::kReglu;
  TW_CHECK(false, op,
           "gate must be one of sigmoid_tanh, geglu, geglu_tanh, swiglu, reglu, but got '", name,
           "'");
}

// CPU: the halves `left` and `right` of z as tensors (rows, N).
struct Halves {
  Tensor left, right;

  Halves(const Tensor& left, const Tensor& right) : left(left), right(right) {}
  // Splits z (rows, 2N) into its even and odd columns if interleaved, otherwise into its first and
  // last N columns.
  Halves(const Tensor& z, bool interleaved) {
    const int64_t n = z.size(1) / 2;
    const Tensor pairs = interleaved ? z.view({z.size(0), n, 2}) : z.view({z.size(0), 2, n});
    left = pairs.select(interleaved ? 2 : 1, 0);
    right = pairs.select(interleaved ? 2 : 1, 1);
  }

  Halves row(int64_t i) const { return {left.narrow(0, i, 1), right.narrow(0, i, 1)}; }
};

inline Tensor gate_of_elements(const Halves& z, Gate gate) {
  switch (gate) {
    case Gate::kSigmoidTanh:
      return at::sigmoid(z.left).mul_(at::tanh(z.right));
    case Gate::kGeglu:
      return at::gelu(z.right, "none").mul_(z.left);
    case Gate::kGegluTanh:
      return at::gelu(z.right, "tanh").mul_(z.left);
    case Gate::kSwiglu:
      return supports_swiglu(z.left, z.right) ? swiglu(z.left, z.right)
                                              : at::silu(z.left).mul_(z.right);
    default:
      return at::relu(z.right).mul_(z.left);
  }
}

// CPU: returns gate(left, right) (rows, N). In the batch-invariant mode, each row is a tensor of
// its own, as in activate_into.
inline Tensor apply_gate(const Halves& z, Gate gate) {
  if (!is_batch_invariant()) return gate_of_elements(z, gate);
  const Tensor y = at::empty(z.left.sizes(), z.left.options());
  parallel_tasks(y.size(0), [&](int64_t row) {
    y.narrow(0, row, 1).copy_(gate_of_elements(z.row(row), gate));
  });
  return y;
}

inline Halves gate_backward_elements(const Tensor& dy, const Halves& z, Gate gate) {
  switch (gate) {
    case Gate::kSigmoidTanh: {
      const Tensor s = at::sigmoid(z.left), t = at::tanh(z.right);
      return {at::sigmoid_backward(dy * t, s), at::tanh_backward(dy * s, t)};
    }
    case Gate::kGeglu:
    case Gate::kGegluTanh: {
      const char* approximate = gate == Gate::kGeglu ? "none" : "tanh";
      return {at::gelu(z.right, approximate).mul_(dy),
              at::gelu_backward(dy * z.left, z.right, approximate)};
    }
    case Gate::kSwiglu: {
      if (!supports_swiglu(z.left, z.right)) {
        return {at::silu_backward(dy * z.right, z.left), at::silu(z.left).mul_(dy)};
      }
      const auto [dleft, dright] = swiglu_backward(dy, z.left, z.right);
      return {dleft, dright};
    }
    default:
      return {at::relu(z.right).mul_(dy), at::threshold_backward(dy * z.left, z.right, 0)};
  }
}

// CPU: returns the gradients of the left and the right half of z from dy (rows, N).
inline Halves gate_backward(const Tensor& dy, const Halves& z, Gate gate) {
  if (!is_batch_invariant()) return gate_backward_elements(dy, z, gate);
  const Halves dz(at::empty(dy.sizes(), dy.options()), at::empty(dy.sizes(), dy.options()));
  parallel_tasks(dy.size(0), [&](int64_t row) {
    const Halves to = dz.row(row);
    const Halves computed = gate_backward_elements(dy.narrow(0, row, 1), z.row(row), gate);
    to.left.copy_(computed.left);
    to.right.copy_(computed.right);
  });
  return dz;
}

#ifdef TORCHWELD_CUDA
// Computes z = x @ weight.T + bias and y = gate(left, right), where left and right are the halves
// of z. `weight` is a pair of matrices. The function stores z only if the tensor `z` is defined.
inline void gated_matmul_into(const Tensor& y, const Tensor& z, const Tensor& x,
                              const Matrix& weight, const OptionalTensor& bias, Gate gate,
                              bool interleaved) {
  if (y.numel() == 0) return;
  matmul_into(rows_of(y), rows_of(x), weight,
              {bias, Activation::kNone, /*gated=*/true, gate, interleaved, z});
}

// Returns dz (rows, 2N), the gradient with respect to z. If z is donated (layers/donation.h), dz
// overwrites z. dbias (N,) receives the column sums of the left half of dz, and dbias_right (N,)
// receives the column sums of the right half. If interleaved, dbias (2N,) receives the column sums
// of all of dz. A gradient that is passed as a tensor of size (0,) is not computed. If replaces_dy
// is true, y = gate(left, right) overwrites dy (rows, N); dy must then be contiguous, and z must
// not be interleaved.
inline Tensor gate_backward_into(const Tensor& dbias, const Tensor& dbias_right, const Tensor& dy,
                                 const Tensor& z, Gate gate, bool interleaved,
                                 bool replaces_dy = false) {
  const Tensor dz = matrix_over(z);
  if (z.numel() == 0) {
    dbias.zero_();
    dbias_right.zero_();
    return dz;
  }
  const Rows in_dy(dy), in_z(z);
  const bool sums = dbias.numel() > 0 || dbias_right.numel() > 0;
  const Tensor partials =
      sums ? empty_floats(2 * column_partials(in_dy.rows, in_dy.n), dy) : Tensor();
  launch_gate_backward(
      {in_dy.tensor.const_data_ptr(), in_z.tensor.const_data_ptr(), dz.mutable_data_ptr(),
       replaces_dy ? dy.mutable_data_ptr() : nullptr, data_if_wanted(dbias),
       data_if_wanted(dbias_right), data_if_wanted<float>(partials), in_dy.rows, in_dy.n,
       in_dy.row_stride, in_z.row_stride, dz.stride(0), gate, interleaved, dtype_of(z)},
      current_stream());
  return dz;
}
#endif

}  // namespace torchweld
