// Split-K, and how long the blocks of a product with a 4-bit weight take. Pure host code.
//
// The times are those of a tile's steps, alone on an SM and among neighbours, of filling its
// pipeline and of joining its parts. They meet what was measured within a few percent; a share of
// the peak rates was wrong by a factor of two, because parts are not free.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "int4/layout.h"

namespace torchweld {

// Steps of all parts of K but a shorter last one, 0 where a part would have none. A step is
// `chunks` of 64 columns.
inline int64_t int4_part_steps(const Int4Shape& shape, int chunks, int parts) {
  const int64_t steps = (shape.chunks() + chunks - 1) / chunks;
  const int64_t part = (steps + parts - 1) / parts;
  return (parts - 1) * part < steps ? part : 0;
}

// The parts that K is cut into. Three only where a tile `kThirds`, whose kernels have code for it.
inline constexpr int kInt4Parts[] = {1, 2, 3, 4, 8};

template <typename Tile>
constexpr bool int4_has_parts(int64_t parts) {
  for (const int known : kInt4Parts) {
    if (parts == known) return parts != 3 || Tile::kThirds;
  }
  return false;
}

// Nanoseconds of a tile's blocks, fitted to 16-bit products of an H200 (K = 4096, groups of 128).
struct Int4Times {
  double step;  // a step of a block that has an SM for itself
  double busy;  // of each of several blocks, whose SM is never idle then
  double fill;  // of the ring, and the sums' way to y
  double join;  // of two parts' sums in their cluster
};

// `tiles` of y, whose parts of K have `steps`; an SM holds `resident` blocks.
inline double int4_blocks_time(const Int4Times& times, double tiles, int parts, int64_t steps,
                               int resident, int sms, bool clusters) {
  const bool joins = parts > 1 && clusters;
  // NOTE: a larger cluster finds no room on SMs whose neighbours have none.
  // Of 132 SMs 39 clusters of three and 30 of four.
  const double reached = !joins || parts == 2 ? 1 : parts == 3 ? 0.89 : parts == 4 ? 0.91 : 0.85;
  const auto wave = [&](double blocks) {
    return times.fill + static_cast<double>(steps) * std::max(times.step, blocks * times.busy) +
           (joins ? blocks * times.join * parts / 2 : 0);
  };
  const double load = std::ceil(tiles * parts / (sms * reached));  // of the busiest SM
  const double waves = std::floor(load / resident), rest = load - waves * resident;
  return waves * wave(resident) + (rest > 0 ? wave(rest) : 0);
}

}  // namespace torchweld
