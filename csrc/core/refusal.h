// The reason why a kernel configuration does not support a problem. The tables of configurations
// use it. Kernels include these tables, so this header includes neither strings nor containers.
#pragma once

#include <cstdint>

#include "core/device.h"

namespace torchweld {

// The reason why a choice does not support a problem. It is empty if the choice supports the
// problem. The first {} in `sentence` stands for values[0], the second {} for values[1]. Only
// text_of() in core/family.h builds the full string, so choose() can test many choices without
// building strings.
struct Refusal {
  const char* sentence = nullptr;
  int64_t values[2] = {};

  Refusal() = default;
  Refusal(const char* sentence, int64_t first = 0, int64_t second = 0)
      : sentence(sentence), values{first, second} {}

  explicit operator bool() const { return sentence != nullptr; }
};

inline Refusal too_much_shared_memory(int64_t bytes, int64_t limit) {
  return {"too much shared memory: {} bytes a block, the GPU has {}", bytes, limit};
}

// Whether a grid can have `blocks` blocks. `blocks` is a double, because a product of sizes can
// overflow int64.
inline bool grid_fits(double blocks) { return blocks <= 2147483647.0; }

// Rounds a size up to a power of two. This is for sizes that vary between calls, such as the number
// of rows.
constexpr int64_t size_class(int64_t size) {
  int64_t power = 1;
  while (power < size) power *= 2;
  return size == 0 ? 0 : power;
}

}  // namespace torchweld
