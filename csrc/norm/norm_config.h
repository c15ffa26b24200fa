// Which kernel and tile the norm of a row takes. Pure host code.
#pragma once

#include <cstdint>

namespace torchweld {

// A row lives in the registers of `threads` threads, `loads` 16-byte accesses each.
struct NormTile {
  int threads;
  int loads;

  constexpr int64_t capacity(int elem_size) const {
    return static_cast<int64_t>(threads) * loads * (16 / elem_size);
  }
  // NOTE: 32 values of x and dy a thread do not fit in the 64 registers that 1024 threads have.
  constexpr bool suits(int elem_size, bool backward) const {
    return !backward || threads < 1024 || loads * (16 / elem_size) <= 16;
  }
};

// The first that holds the row is taken.
inline constexpr NormTile kNormTiles[] = {{32, 1},  {32, 2},  {32, 3},  {32, 4},  {128, 2},
                                          {128, 4}, {256, 4}, {512, 4}, {1024, 4}};
inline constexpr int kNumNormTiles = sizeof(kNormTiles) / sizeof(kNormTiles[0]);

// Rows that no tile holds are read again for every sum by this many threads.
inline constexpr int kNormStreamThreads = 256;

struct NormProblem {
  int64_t n;      // row length
  int elem_size;  // bytes
  bool aligned;   // every row and vector starts on a 16-byte boundary
  bool backward = false;

  constexpr bool vector() const { return aligned && n % (16 / elem_size) == 0; }
};

// An index into kNormTiles, or -1 for the streaming kernel.
constexpr int choose_norm_tile(const NormProblem& problem) {
  for (int i = 0; problem.vector() && i < kNumNormTiles; ++i) {
    if (kNormTiles[i].suits(problem.elem_size, problem.backward) &&
        problem.n <= kNormTiles[i].capacity(problem.elem_size)) {
      return i;
    }
  }
  return -1;
}

}  // namespace torchweld
