// The element types of the code that does not use torch.
#pragma once

#include <cstdint>

namespace torchweld {

enum class DType : int8_t { kFloat32, kFloat16, kBFloat16 };

}  // namespace torchweld
