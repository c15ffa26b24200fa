// The order of the work tiles of Hopper's attention kernels. A kernel finds its work tile by its
// index in this order.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/fast_divide.h"

namespace torchweld {

// The order of AttentionSchedule with 32-bit values, and with divisors that the host computes: by
// section of heads, then by tile of rows, then by head.
struct AttentionTileOrder {
  uint32_t section, heads;
  FastDivisor tiles, section_tiles, section_heads, last_section_heads, nheads;

  // A head has `tiles` tiles. `heads` is the number of heads of all sequences, and `nheads` that of
  // one sequence.
  AttentionTileOrder(int64_t tiles, int64_t heads, int64_t nheads, int64_t section)
      : section(static_cast<uint32_t>(std::min(section, heads))),
        heads(static_cast<uint32_t>(heads)),
        tiles(tiles),
        section_tiles(this->section * tiles),
        section_heads(this->section),
        last_section_heads(heads % this->section == 0 ? this->section : heads % this->section),
        nheads(nheads) {}

  // Returns the number of work tiles.
  int64_t size() const { return int64_t{heads} * tiles.divisor(); }

  struct Place {
    uint32_t sequence, head, tile;
  };
  __device__ __forceinline__ Place place(uint32_t index) const {
    const uint32_t at = section_tiles.divide(index);
    const uint32_t in_section = index - at * section_tiles.divisor(), first_head = at * section;
    const FastDivisor& width = first_head + section <= heads ? section_heads : last_section_heads;
    const uint32_t tile = width.divide(in_section);
    const uint32_t head = first_head + in_section - tile * width.divisor();
    const uint32_t sequence = nheads.divide(head);
    return {sequence, head - sequence * nheads.divisor(), tile};
  }
};

}  // namespace torchweld
