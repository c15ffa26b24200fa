// Element types as the torch-free part of the library names them.
#pragma once

#include <cstdint>

namespace torchweld {

enum class DType : int8_t { kFloat32, kFloat16, kBFloat16 };

constexpr int dtype_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

}  // namespace torchweld
