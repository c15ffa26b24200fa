// Which kernel and tile a row softmax takes. Pure host code: tested without a GPU, printed by
// explain.
#pragma once

#include <cstdint>

namespace torchweld {

// A row lives in the registers of `cluster` blocks of `threads` threads, `loads` accesses each; an
// access is 16 bytes (vector) or one element.
struct SoftmaxTile {
  int threads;
  int loads;
  bool vector;
  int cluster = 1;

  constexpr int elems(int elem_size) const { return vector ? 16 / elem_size : 1; }
  constexpr int64_t capacity(int elem_size) const {
    return static_cast<int64_t>(cluster) * threads * loads * elems(elem_size);
  }
  // The registers must hold the row without spills.
  // NOTE: the forward could hold more than 32 values a thread, but then an SM has room for one
  // block, which loads nothing while it computes: 2.2x a copy at n = 65536 in 16 bits, where the
  // streaming kernel takes 1.9x.
  constexpr bool suits(int elem_size, bool backward) const {
    if (!backward) return loads * elems(elem_size) <= 32;
    return threads * (2 * loads * elems(elem_size) + 24) <= 65536;  // y and dy in fp32
  }
};

// In the order of preference: the first that suits and holds the row is taken. A cluster is for
// rows that no block holds: where both could, the block was faster (H200, 32768 fp32: 1.04x a copy
// against 1.28x), and two reads cost 1.6x.
inline constexpr SoftmaxTile kSoftmaxTiles[] = {
    {32, 1, true},     {32, 2, true},     {64, 2, true},     {128, 2, true},    {128, 4, true},
    {256, 4, true},    {512, 4, true},    {512, 8, true},    {1024, 4, true},   {1024, 8, true},
    {512, 4, true, 2}, {512, 4, true, 4}, {512, 4, true, 8}, {512, 8, true, 8}, {1024, 8, true, 8},
    {32, 4, false},    {32, 16, false},   {128, 16, false}};
inline constexpr int kNumSoftmaxTiles = sizeof(kSoftmaxTiles) / sizeof(kSoftmaxTiles[0]);

// Rows that no tile holds are read twice by this many threads.
inline constexpr int kSoftmaxStreamThreads = 512;

struct SoftmaxProblem {
  int64_t n;      // row length
  int elem_size;  // bytes
  bool aligned;   // every row of every tensor starts on a 16-byte boundary
  bool backward = false;
  bool tiled = true;     // false where the mask asks for the streaming kernel
  bool clusters = true;  // sm_90 and later
};

// An index into kSoftmaxTiles, or -1 for the streaming kernel.
constexpr int choose_softmax_tile(const SoftmaxProblem& problem) {
  const bool vector = problem.aligned && problem.n % (16 / problem.elem_size) == 0;
  for (int i = 0; problem.tiled && i < kNumSoftmaxTiles; ++i) {
    const SoftmaxTile& tile = kSoftmaxTiles[i];
    if (tile.vector == vector && tile.suits(problem.elem_size, problem.backward) &&
        (tile.cluster == 1 || problem.clusters) && problem.n <= tile.capacity(problem.elem_size)) {
      return i;
    }
  }
  return -1;
}

}  // namespace torchweld
