// Converts tensors to the plain arguments of kernel launchers. This is host code for CUDA builds
// only.
#pragma once

#include <ATen/Context.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <optional>

#include "core/check.h"
#include "core/dtype.h"
#include "core/launch.h"

namespace torchweld {

// While an object of this class exists, `device` is the current CUDA device. In a dry run the class
// does nothing.
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

// Returns the address of a tensor's elements. In a dry run tensors have no memory, so the function
// returns an address in a placeholder, and no code reads this placeholder. nullptr would not do,
// because it tells a launcher that the tensor is absent. The address is as far from a 16-byte
// boundary as the tensor's first element would be.
template <typename T>
T* mutable_data(const at::Tensor& t) {
  alignas(16) static char placeholder[32];
  if (!is_dry_run()) return static_cast<T*>(t.mutable_data_ptr());
  void* const address = placeholder + t.storage_offset() * t.element_size() % 16;
  return static_cast<T*>(address);
}
template <typename T>
const T* const_data(const at::Tensor& t) {
  return is_dry_run() ? mutable_data<const T>(t) : static_cast<const T*>(t.const_data_ptr());
}

// Whether torch's settings allow a matmul with operands of the dtype of t to round them to TF32.
inline bool matmul_may_use_tf32(const Tensor& t) {
  return t.scalar_type() == at::kFloat &&
         at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) ==
             at::Float32Precision::TF32;
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

// An optional vector with contiguous elements. A vector that is not contiguous is copied. data()
// returns nullptr if the vector is absent.
struct Vector {
  Tensor tensor;

  explicit Vector(const OptionalTensor& t) : tensor(is_given(t) ? t->contiguous() : Tensor()) {}

  template <typename T = void>
  const T* data() const {
    return tensor.defined() ? const_data<T>(tensor) : nullptr;
  }
};

// Returns the distance between consecutive rows of a tensor (..., n), in elements. Returns nullopt
// if the distance is not the same for all rows.
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

// A tensor (..., n) as a matrix (rows, n). The elements of a row are contiguous, and row i starts
// at offset i * row_stride. The constructor copies the tensor only if its strides don't allow this.
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
