// Element types of the torch-free part of the library.
#pragma once

#include <cstdint>

namespace torchweld {

enum class DType : int8_t { kFloat32, kFloat16, kBFloat16 };

}  // namespace torchweld
