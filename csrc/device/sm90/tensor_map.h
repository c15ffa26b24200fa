// Makes tensor maps. A tensor map tells TMA where a tensor lies in global memory. This is host code
// that does not use torch.
// Source: CUDA driver API, "Tensor Map Object Management".
#pragma once

#include <cuda.h>

#include <cstdint>

#include "core/refusal.h"

namespace torchweld {

using TensorMap = CUtensorMap;

// A tensor with four dimensions, and the box of elements that one TMA copy moves. The first
// dimension is the contiguous one.
struct TensorBox {
  const void* data;
  int elem_size;       // size of an element in bytes: 2 or 4
  int64_t sizes[4];    // size of each dimension, in elements
  int64_t strides[4];  // in elements; strides[0] is 1; an expanded dimension has stride 0
  int box[4];          // size of the box in each dimension, in elements
  bool bfloat16 = false;
  bool tf32 = false;  // whether 4-byte values are rounded to TF32 during the copy
  int swizzle = 128;  // the number of bytes in a row of a box: 128 or 64
};

// Returns why TMA does not support a tensor and its box. The refusal is empty if TMA supports them.
inline Refusal tensor_box_refusal(const TensorBox& t) {
  constexpr int64_t kMaxSize = int64_t{1} << 31;  // TMA coordinates are signed 32-bit numbers
  constexpr int64_t kMaxStride = int64_t{1} << 40;
  if (reinterpret_cast<uintptr_t>(t.data) % 16 != 0) return "it does not start on 16 bytes";
  for (int i = 0; i < 4; ++i) {
    if (t.sizes[i] < 1 || t.sizes[i] >= kMaxSize)
      return {"a dimension has {} elements", t.sizes[i]};
    if (t.box[i] < 1 || t.box[i] > 256) return {"a box has {} elements in a dimension", t.box[i]};
    const int64_t bytes = t.strides[i] * t.elem_size;
    if (i > 0 && (bytes % 16 != 0 || bytes < 0 || bytes >= kMaxStride)) {
      return {"a stride of {} bytes is no multiple of 16 below 2^40", bytes};
    }
  }
  if (t.box[0] * t.elem_size != t.swizzle) return {"a row of a box is not {} bytes", t.swizzle};
  return {};
}

// Throws std::runtime_error if the driver refuses the tensor. The error names `op`, the sizes and
// the strides.
TensorMap make_tensor_map(const char* op, const TensorBox& box);

}  // namespace torchweld
