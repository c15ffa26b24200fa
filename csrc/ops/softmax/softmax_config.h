// Which kernel and tile a row softmax takes. Pure host code: tested without a GPU, printed by
// explain.
#pragma once

#include <cstdint>

namespace torchweld {

// A row lives in the registers of `threads` threads, `loads` accesses of 16 bytes each.
struct SoftmaxTile {
  int threads;
  int loads;

  constexpr int values(int elem_size) const { return loads * 16 / elem_size; }  // of a thread
  // Where rows start anywhere, the first access may hold as little as one column.
  constexpr int64_t capacity(int elem_size, bool aligned) const {
    return static_cast<int64_t>(threads) * values(elem_size) - (aligned ? 0 : 16 / elem_size - 1);
  }
  // The registers must hold the row without spills.
  // NOTE: the forward could hold more than 32 values a thread, but then an SM has room for one
  // block, which loads nothing while it computes: 2.2x a copy at n = 65536 in 16 bits, where even
  // the streaming kernel takes 1.9x.
  constexpr bool suits(int elem_size, bool backward) const {
    if (!backward) return values(elem_size) <= 32;
    return threads * (2 * values(elem_size) + 24) <= 65536;  // y and dy in fp32
  }
};

// In the order of preference: the first that suits and holds the row is taken.
inline constexpr SoftmaxTile kSoftmaxTiles[] = {{32, 1},  {32, 2},  {64, 2},  {128, 2},  {128, 4},
                                                {256, 4}, {512, 4}, {512, 8}, {1024, 4}, {1024, 8}};
inline constexpr int kNumSoftmaxTiles = sizeof(kSoftmaxTiles) / sizeof(kSoftmaxTiles[0]);

// A row lives in the shared memory of `cluster` blocks, one row after the other: a ring of pieces
// that one warp fills while `threads` threads reduce and finish what has arrived. A piece is
// `accesses` accesses of 16 bytes a thread.
struct SoftmaxRing {
  int threads;
  int accesses;
  int cluster;
  int blocks_per_sm;

  static constexpr int kExtraBytes = 2048;  // barriers and what the blocks of a cluster exchange

  constexpr int block_threads() const { return threads + 32; }
  constexpr int piece_bytes() const { return threads * accesses * 16; }
  // Of one block. An SM has 228 KiB, of which every block takes 1 KiB for the system.
  constexpr int shared_bytes() const { return 228 * 1024 / blocks_per_sm - 1024; }
  // A slot holds a piece of x, or one of y and one of dy.
  constexpr int slots(bool backward) const {
    return (shared_bytes() - kExtraBytes) / (piece_bytes() * (backward ? 2 : 1));
  }
  constexpr int64_t capacity(int elem_size, bool backward) const {
    return static_cast<int64_t>(cluster) * slots(backward) * piece_bytes() / elem_size;
  }
};

// In the order of preference: the first of which a row leaves a third to the next rows, or else
// the first that holds the row.
inline constexpr SoftmaxRing kSoftmaxRings[] = {
    {512, 2, 1, 1}, {512, 2, 2, 1}, {512, 2, 4, 1}, {512, 2, 8, 1}};
inline constexpr int kNumSoftmaxRings = sizeof(kSoftmaxRings) / sizeof(kSoftmaxRings[0]);

// Rows that no tile holds are read twice by this many threads.
inline constexpr int kSoftmaxStreamThreads = 512;

// From this length on a row takes a ring where it can.
inline constexpr int64_t kSoftmaxRingFrom = 16385;

struct SoftmaxProblem {
  int64_t n;      // row length
  int elem_size;  // bytes
  bool aligned;   // every row of the result starts on a 16-byte boundary
  bool backward = false;
  bool tiled = true;          // false where the mask asks for the streaming kernel
  bool clusters = true;       // the device and the code for it have clusters and bulk copies
  bool in_phase = true;       // a row is as far from a 16-byte boundary in every tensor
  int shared_limit = 232448;  // bytes of shared memory that a block may have
};

enum class SoftmaxKernel { kTile, kRing, kStream };

struct SoftmaxChoice {
  SoftmaxKernel kernel;
  int index;  // into kSoftmaxTiles or kSoftmaxRings, else -1
};

constexpr int choose_softmax_ring(const SoftmaxProblem& problem) {
  if (!problem.clusters || !problem.in_phase) return -1;
  for (int spare = 1; spare >= 0; --spare) {
    for (int i = 0; i < kNumSoftmaxRings; ++i) {
      const SoftmaxRing& ring = kSoftmaxRings[i];
      const int64_t capacity = ring.capacity(problem.elem_size, problem.backward);
      if (ring.shared_bytes() <= problem.shared_limit &&
          problem.n <= (spare ? capacity / 3 * 2 : capacity)) {
        return i;
      }
    }
  }
  return -1;
}

constexpr int choose_softmax_tile(const SoftmaxProblem& problem) {
  for (int i = 0; i < kNumSoftmaxTiles; ++i) {
    const SoftmaxTile& tile = kSoftmaxTiles[i];
    if (tile.suits(problem.elem_size, problem.backward) &&
        problem.n <= tile.capacity(problem.elem_size, problem.aligned)) {
      return i;
    }
  }
  return -1;
}

constexpr SoftmaxChoice choose_softmax(const SoftmaxProblem& problem) {
  if (!problem.tiled) return {SoftmaxKernel::kStream, -1};
  const int ring = choose_softmax_ring(problem), tile = choose_softmax_tile(problem);
  if (ring >= 0 && (tile < 0 || problem.n >= kSoftmaxRingFrom)) return {SoftmaxKernel::kRing, ring};
  return {tile >= 0 ? SoftmaxKernel::kTile : SoftmaxKernel::kStream, tile};
}

}  // namespace torchweld
