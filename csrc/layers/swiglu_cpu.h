// CPU loops that compute silu(left) * right, or its gradients. They read every operand only once.
// silu(x) = x s with s = 1 / (1 + e^-x).
#pragma once

#include <ATen/ops/empty.h>
#include <c10/util/BFloat16.h>

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "core/index.h"
#include "core/parallel.h"
#include "core/simd_cpu.h"

namespace torchweld {

// Returns true if swiglu and swiglu_backward support left and right (rows, N).
inline bool supports_swiglu(const Tensor& left, const Tensor& right) {
  const auto dtype = left.scalar_type();
  return (dtype == at::kFloat || dtype == at::kBFloat16) && left.stride(1) == 1 &&
         right.stride(1) == 1;
}

// Calls body(row) for each of `rows` rows in parallel. n is the number of elements of a row. The
// rows are grouped into tasks of about 16384 elements.
template <typename Body>
void for_each_row(int64_t rows, int64_t n, const Body& body) {
  constexpr int64_t kElemsPerTask = 1 << 14;
  const int64_t block = std::max<int64_t>(kElemsPerTask / std::max<int64_t>(n, 1), 1);
  parallel_tasks(divide_up(rows, block), [&](int64_t task) {
    with_vectors([&] {
      for (int64_t i = task * block; i < std::min(rows, (task + 1) * block); ++i) body(i);
    });
  });
}

template <typename T>
Tensor swiglu_of_dtype(const Tensor& left, const Tensor& right) {
  const Tensor y = at::empty(left.sizes(), left.options());
  const int64_t n = left.size(1), left_stride = left.stride(0), right_stride = right.stride(0);
  T* const to = y.mutable_data_ptr<T>();
  const T *const lefts = left.const_data_ptr<T>(), *const rights = right.const_data_ptr<T>();
  for_each_row(left.size(0), n, [&](int64_t row) {
    T* __restrict__ out = to + row * n;
    const T* __restrict__ l = lefts + row * left_stride, * __restrict__ r =
                                                             rights + row * right_stride;
    for (int64_t j = 0; j < n; ++j) {
      const float x = static_cast<float>(l[j]);
      out[j] = round_to<T>(x / (1.0f + exp_in_vectors(-x)) * static_cast<float>(r[j]));
    }
  });
  return y;
}

// Returns silu(left) * right.
inline Tensor swiglu(const Tensor& left, const Tensor& right) {
  return left.scalar_type() == at::kFloat ? swiglu_of_dtype<float>(left, right)
                                          : swiglu_of_dtype<at::BFloat16>(left, right);
}

template <typename T>
std::pair<Tensor, Tensor> swiglu_backward_of_dtype(const Tensor& dy, const Tensor& left,
                                                   const Tensor& right) {
  const Tensor dleft = at::empty(left.sizes(), left.options());
  const Tensor dright = at::empty(left.sizes(), left.options());
  const Tensor grad = dy.contiguous();
  const int64_t n = left.size(1), left_stride = left.stride(0), right_stride = right.stride(0);
  T *const to_left = dleft.mutable_data_ptr<T>(), *const to_right = dright.mutable_data_ptr<T>();
  const T *const grads = grad.const_data_ptr<T>(), *const lefts = left.const_data_ptr<T>(),
                 *const rights = right.const_data_ptr<T>();
  for_each_row(left.size(0), n, [&](int64_t row) {
    T* __restrict__ out_left = to_left + row * n, * __restrict__ out_right = to_right + row * n;
    const T* __restrict__ g = grads + row * n;
    const T* __restrict__ l = lefts + row * left_stride, * __restrict__ r =
                                                             rights + row * right_stride;
    for (int64_t j = 0; j < n; ++j) {
      const float x = static_cast<float>(l[j]), d = static_cast<float>(g[j]);
      const float s = 1.0f / (1.0f + exp_in_vectors(-x));
      out_left[j] = round_to<T>(d * static_cast<float>(r[j]) * s * (1.0f + x * (1.0f - s)));
      out_right[j] = round_to<T>(d * (x * s));
    }
  });
  return {dleft, dright};
}

// Returns the gradients with respect to left and right. dy (rows, N) is the gradient with respect
// to the result.
inline std::pair<Tensor, Tensor> swiglu_backward(const Tensor& dy, const Tensor& left,
                                                 const Tensor& right) {
  return left.scalar_type() == at::kFloat ? swiglu_backward_of_dtype<float>(dy, left, right)
                                          : swiglu_backward_of_dtype<at::BFloat16>(dy, left, right);
}

}  // namespace torchweld
