// Converts tensors to the plain arguments of kernel launchers. This is host code for CUDA builds
// only.
#pragma once

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <optional>

#include "core/check.h"
#include "core/dtype.h"
#include "core/launch.h"

namespace torchweld {

// Makes `device` the current device during its lifetime. Does nothing in a dry run.
class OnDevice {
 public:
  explicit OnDevice(const c10::Device& device) {
    if (!is_dry_run()) guard_.emplace(device);
  }

 private:
  std::optional<c10::cuda::CUDAGuard> guard_;
};

inline cudaStream_t current_stream() {
  return is_dry_run() ? nullptr : c10::cuda::getCurrentCUDAStream().stream();
}

// The address of a tensor's elements. In a dry run tensors have no memory. Then this returns the
// address of a placeholder, which is never read, because nullptr would tell a launcher that the
// tensor is absent.
template <typename T>
T* mutable_data(const at::Tensor& t) {
  alignas(16) static char placeholder[16];
  return static_cast<T*>(is_dry_run() ? placeholder : t.mutable_data_ptr());
}
template <typename T>
const T* const_data(const at::Tensor& t) {
  return is_dry_run() ? mutable_data<const T>(t) : static_cast<const T*>(t.const_data_ptr());
}

inline DType dtype_of(const at::Tensor& t) {
  switch (t.scalar_type()) {
    case at::kHalf:
      return DType::kFloat16;
    case at::kBFloat16:
      return DType::kBFloat16;
    default:
      return DType::kFloat32;
  }
}

// A contiguous copy of an optional vector. data() is nullptr if the vector is absent.
struct Vector {
  Tensor tensor;

  explicit Vector(const OptionalTensor& t) : tensor(is_given(t) ? t->contiguous() : Tensor()) {}

  template <typename T = void>
  const T* data() const {
    return tensor.defined() ? const_data<T>(tensor) : nullptr;
  }
};

// The row stride of a tensor (..., n), or nullopt if the rows have no common stride.
inline std::optional<int64_t> row_stride_of(const at::Tensor& t) {
  int64_t stride = t.size(-1), expected = -1;
  for (int64_t d = t.dim() - 2; d >= 0; --d) {
    if (t.size(d) == 1) continue;
    if (expected == -1) {
      stride = t.stride(d);
    } else if (t.stride(d) != expected) {
      return std::nullopt;
    }
    expected = t.stride(d) * t.size(d);
  }
  return stride;
}

// A tensor as a matrix (rows, n) with contiguous columns and one row stride. Copies the tensor only
// if its strides don't allow that.
struct Rows {
  at::Tensor tensor;
  int64_t rows = 0;
  int64_t n = 0;
  int64_t row_stride = 0;

  explicit Rows(const at::Tensor& t) : n(t.size(-1)) {
    rows = n == 0 ? 0 : t.numel() / n;
    const auto stride = n > 1 && t.stride(-1) != 1 ? std::nullopt : row_stride_of(t);
    tensor = stride ? t : t.contiguous();
    row_stride = stride.value_or(n);
  }
};

}  // namespace torchweld
