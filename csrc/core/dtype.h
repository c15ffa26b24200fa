// Element types as the torch-free part of the library names them.
#pragma once

#include <cstdint>

namespace torchweld {

enum class DType : int8_t { kFloat32, kFloat16, kBFloat16 };

}  // namespace torchweld
