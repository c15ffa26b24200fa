// Makes template arguments from run-time values: dtypes, indices and conditions.
#pragma once

#include <initializer_list>
#include <type_traits>

#include "core/dtype.h"
#include "device/vec.cuh"

namespace torchweld {

// Calls body(T{}) with the C++ element type T of the dtype.
template <typename Body>
void dispatch_dtype(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat32:
      return body(float{});
    case DType::kFloat16:
      return body(__half{});
    case DType::kBFloat16:
      return body(__nv_bfloat16{});
  }
}

// Calls body with `index` as a std::integral_constant. `index` must be less than kCount.
template <int kCount, int kIndex = 0, typename Body>
void dispatch_index(int index, const Body& body) {
  if constexpr (kIndex < kCount) {
    if (index == kIndex) return body(std::integral_constant<int, kIndex>{});
    dispatch_index<kCount, kIndex + 1>(index, body);
  }
}

// Calls body once and passes every value as a std::bool_constant.
template <typename Body>
void dispatch_bools(const Body& body) {
  body();
}
template <typename Body, typename... Rest>
void dispatch_bools(const Body& body, bool value, Rest... rest) {
  const auto with = [&](auto first) {
    dispatch_bools([&](auto... others) { body(first, others...); }, rest...);
  };
  value ? with(std::true_type()) : with(std::false_type());
}

// Whether every row starts on a 16-byte boundary. The rows start at `base` and are row_bytes apart.
inline bool rows_aligned(const void* base, int64_t row_bytes = 0) {
  return reinterpret_cast<uintptr_t>(base) % kVectorBytes == 0 && row_bytes % kVectorBytes == 0;
}

// A matrix that a kernel reads or writes. row_stride is the distance between its rows in elements.
struct MatrixRows {
  const void* base;
  int64_t row_stride;
};

// Calls body(T{}, elems) with the element type T and the number of elements in one access. Each
// matrix has n columns. An access is 16 bytes if n elements are a multiple of 16 bytes and all rows
// start on 16-byte boundaries. Otherwise an access is one element.
template <typename Body>
void dispatch_access(DType dtype, int64_t n, std::initializer_list<MatrixRows> matrices,
                     const Body& body) {
  dispatch_dtype(dtype, [&](auto element) {
    constexpr int kElems = kVectorBytes / sizeof(element);
    bool vector = n % kElems == 0;
    for (const MatrixRows& m : matrices) {
      vector = vector && rows_aligned(m.base, m.row_stride * sizeof(element));
    }
    vector ? body(element, std::integral_constant<int, kElems>{})
           : body(element, std::integral_constant<int, 1>{});
  });
}

}  // namespace torchweld
