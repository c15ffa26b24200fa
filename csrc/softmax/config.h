// Which kernel and tile a row softmax takes. Pure host code: tested without a GPU, printed by
// explain.
//
// A row is held in one of three ways: in the registers of as many threads as it needs (a tile); in
// the shared memory of a cluster, where the next row arrives while this one is reduced and stored
// (a ring); or nowhere, and read twice (a stream).
#pragma once

#include <cstdint>

#include "core/family.h"

namespace torchweld {

// Which rows a tile is for: 16-bit scores under a mask, in the forward, all other rows, or both.
enum class SoftmaxRows : int8_t { kAll, kScores, kOthers };

// A row lives in the registers of up to `threads` threads, `loads` accesses of 16 bytes each. Where
// rows start anywhere, what is left and right of a row's whole accesses is one element a thread.
struct SoftmaxTile {
  int threads;
  int loads;
  SoftmaxRows rows;

  constexpr int values(int elem_size) const { return loads * 16 / elem_size; }  // of a thread
  constexpr int64_t capacity(int elem_size, bool aligned) const {
    return static_cast<int64_t>(threads) * values(elem_size) + (aligned ? 0 : 16 / elem_size - 1);
  }
  // As many as a row needs; single warps stay as they are.
  constexpr int threads_for(int64_t n, int elem_size) const {
    const int64_t accesses = n / (16 / elem_size);
    const int64_t wanted = ((accesses + loads - 1) / loads + 31) / 32 * 32;
    return wanted < threads ? static_cast<int>(wanted < 32 ? 32 : wanted) : threads;
  }
  // More values stay as they were loaded, and their exponentials are computed twice.
  constexpr bool computes_again(int elem_size) const { return values(elem_size) > 32; }
  constexpr bool serves(int elem_size, bool backward, bool masked) const {
    const bool scores = masked && elem_size == 2 && !backward;
    return rows == SoftmaxRows::kAll || (rows == SoftmaxRows::kScores) == scores;
  }
  // The registers must hold the row without spills.
  // NOTE: the forward could hold more than 32 values a thread, but then an SM has room for one
  // block, which loads nothing while it computes: 2.2x a copy at n = 65536 in 16 bits, where even
  // the streaming kernel takes 1.9x.
  constexpr bool suits(int elem_size, bool backward, bool masked) const {
    if (!serves(elem_size, backward, masked)) return false;
    if (!backward) return values(elem_size) <= 32 || rows == SoftmaxRows::kScores;
    return threads * (2 * values(elem_size) + 24) <= 65536;  // y and dy in fp32
  }
};

// In the order of preference: the first that suits and holds the row is taken.
// NOTE: a causal row has, on average, half of its scores to load and a store for every access.
// Threads with 4 accesses, fewer of them a row, keep more rows on their way: 0.78 of a copy of all
// of a matrix in 16 bits at n = 2048 on an H200 instead of 0.93, 8 of 128 threads 0.80 at 8192
// instead of 0.88. In fp32 that gains nothing.
inline constexpr SoftmaxTile kSoftmaxTiles[] = {
    {32, 1, SoftmaxRows::kAll},    {32, 2, SoftmaxRows::kAll},     {32, 4, SoftmaxRows::kScores},
    {64, 2, SoftmaxRows::kOthers}, {64, 4, SoftmaxRows::kScores},  {128, 2, SoftmaxRows::kOthers},
    {128, 4, SoftmaxRows::kAll},   {128, 8, SoftmaxRows::kScores}, {256, 4, SoftmaxRows::kOthers},
    {512, 4, SoftmaxRows::kAll},   {512, 8, SoftmaxRows::kAll},    {1024, 4, SoftmaxRows::kAll},
    {1024, 8, SoftmaxRows::kAll}};
inline constexpr int kNumSoftmaxTiles = sizeof(kSoftmaxTiles) / sizeof(kSoftmaxTiles[0]);

// A row lives in the shared memory of `cluster` blocks, one row after the other: a ring of slots
// that one warp fills while groups of threads, which take the rows by turns, reduce and finish what
// has arrived. A slot is a piece of x, or one of y and one of dy.
struct SoftmaxRing {
  int cluster;
  int preferred[2][2];  // 1024 columns: [the gradient][elements of 4 bytes]

  static constexpr int kGroups = 3;
  static constexpr int kThreads = 256;      // of a group
  static constexpr int kLoads = 4;          // accesses of 16 bytes a thread, of a slot
  static constexpr int kExtraBytes = 2048;  // barriers and what the blocks of a cluster exchange
  static constexpr int kSharedBytes = 227 * 1024;  // of a block, which has an SM for itself

  constexpr int block_threads() const { return kGroups * kThreads + 32; }
  constexpr int accesses(bool backward) const { return kLoads / (backward ? 2 : 1); }  // of a piece
  constexpr int piece_bytes(bool backward) const { return kThreads * accesses(backward) * 16; }
  constexpr int shared_bytes() const { return kSharedBytes; }
  // Larger clusters don't fit on every chip that has clusters; only the gradient gains by them.
  constexpr bool portable() const { return cluster <= 8; }
  constexpr bool serves(bool backward) const { return portable() || backward; }
  constexpr int slots() const { return (kSharedBytes - kExtraBytes) / (kThreads * kLoads * 16); }

  // The longest row that is read once, and the longest one: up to a quarter of what stays in the
  // slots of a portable cluster is read twice.
  constexpr int64_t read_once_to(int elem_size, bool backward, bool aligned) const {
    return columns(slots(), elem_size, backward, aligned);
  }
  constexpr int64_t capacity(int elem_size, bool backward, bool aligned) const {
    return columns(slots() + (portable() ? slots() / 4 : 0), elem_size, backward, aligned);
  }
  constexpr int64_t preferred_to(int elem_size, bool backward) const {
    return int64_t{1024} * preferred[backward][elem_size == 4];
  }

 private:
  // Of so many pieces a block. Accesses begin at 16-byte boundaries, wherever a row does.
  constexpr int64_t columns(int pieces, int elem_size, bool backward, bool aligned) const {
    return static_cast<int64_t>(cluster) * pieces * piece_bytes(backward) / elem_size -
           (aligned ? 0 : 16 / elem_size - 1);
  }
};

// In the order of preference: the first that is preferred for the row and reads it once, or else
// the first that holds it. The clusters are those of the fastest rings on an H200 at 16384 to
// 262144 columns, or as fast: at most 80 KiB a block while clusters grow, x or y and dy, and two
// blocks or more in the gradient. The bounds between are not measured, nor are rows beyond 262144.
// NOTE: 7 clusters of 16 leave 20 of 132 SMs idle. They pay only where 8 blocks read a part twice:
// 1.04 of moving three tensors in the gradient of fp32 rows of 262144, against 1.13.
inline constexpr SoftmaxRing kSoftmaxRings[] = {{1, {{40, 20}, {0, 0}}},
                                                {2, {{80, 40}, {40, 20}}},
                                                {4, {{160, 80}, {80, 40}}},
                                                {8, {{1088, 544}, {544, 272}}},
                                                {16, {{0, 0}, {896, 448}}}};
inline constexpr int kNumSoftmaxRings = sizeof(kSoftmaxRings) / sizeof(kSoftmaxRings[0]);

// Rows that no tile holds are read twice by this many threads.
inline constexpr int kSoftmaxStreamThreads = 512;

// From this length on a row of 16-bit elements takes a ring where it can, in the forward and in the
// gradient. Other rows take one where no tile holds them: with fp32 the largest tile is the faster
// one.
inline constexpr int64_t kSoftmaxRingFrom[2] = {32768, 16384};
// NOTE: 16-bit rows up to here that need more than 512 threads leave an SM one block in registers,
// which loads nothing while it computes: reading them twice is faster (1.16x a copy against 1.35x).
inline constexpr int64_t kSoftmaxReadTwiceFrom = 16385, kSoftmaxReadTwiceTo = 24576;

struct SoftmaxProblem {
  int64_t n;      // row length
  int elem_size;  // bytes
  bool aligned;   // every row of the result starts on a 16-byte boundary
  bool backward = false;
  bool tiled = true;     // false where the mask asks for the streaming kernel
  bool in_phase = true;  // a row is as far from a 16-byte boundary in every tensor
  int64_t rows = 1;
  bool masked = false;
  bool bfloat16 = false;
  bool capped = false;  // softcap or a sink: see CappedMask
  DeviceFacts device = {};
};

// kTile: rows in registers. kRing: in the shared memory of a cluster. kStream: read twice.
enum class SoftmaxEngine : int8_t { kTile, kRing, kStream };

struct SoftmaxChoice {
  SoftmaxEngine engine;
  int tile;  // index into kSoftmaxTiles or kSoftmaxRings, 0 for kStream
};

inline Refusal softmax_row_refusal(const SoftmaxProblem& p, int64_t capacity) {
  return p.n <= capacity ? Refusal() : Refusal("holds {} elements, the row has {}", capacity, p.n);
}

// With softcap or a sink the gradient reads a third matrix, for which registers have no room.
constexpr bool softmax_needs_scores(const SoftmaxProblem& p) { return p.capped && p.backward; }

// Threads of a row that is read twice: no more than its accesses in that gradient.
constexpr int softmax_stream_threads(const SoftmaxProblem& p) {
  const int64_t accesses = (p.n + 16 / p.elem_size - 1) / (16 / p.elem_size);
  const bool fewer = softmax_needs_scores(p) && accesses < kSoftmaxStreamThreads;
  return fewer ? static_cast<int>((accesses + 31) / 32 * 32) : kSoftmaxStreamThreads;
}

inline Refusal softmax_refusal(const SoftmaxProblem& p, const SoftmaxTile& tile) {
  if (softmax_needs_scores(p)) return "no registers for the scores, which softcap or a sink needs";
  if (!p.tiled) return "the rows need 64-bit indices or the scale is 0";
  if (!tile.serves(p.elem_size, p.backward, p.masked)) {
    return tile.rows == SoftmaxRows::kScores ? "for 16-bit scores under a mask"
                                             : "16-bit scores under a mask have other tiles";
  }
  if (!tile.suits(p.elem_size, p.backward, p.masked)) return "too many registers for this dtype";
  return softmax_row_refusal(p, tile.capacity(p.elem_size, p.aligned));
}

inline Refusal softmax_refusal(const SoftmaxProblem& p, const SoftmaxRing& ring) {
  if (p.capped) return "knows no softcap and no sink";
  constexpr int64_t kMaxRows = int64_t{1} << 30;  // rings count in 32 bits
  if (!p.tiled) return "the rows need 64-bit indices or the scale is 0";
  if (!ring.serves(p.backward)) return "for the gradient alone";
  if (!p.device.clusters) return "the GPU, or the code built for it, has no thread-block clusters";
  if (p.rows > kMaxRows) return "more than 2^30 rows";
  if (!ring.portable() && !p.device.clusters_of_16) return "clusters of 16 do not fit on the GPU";
  if (!p.in_phase) {
    return "the tensors' rows start at different distances from 16-byte boundaries";
  }
  if (ring.shared_bytes() > p.device.shared_limit) {
    return too_much_shared_memory(ring.shared_bytes(), p.device.shared_limit);
  }
  return softmax_row_refusal(p, ring.capacity(p.elem_size, p.backward, p.aligned));
}

// The first ring that is preferred for the row and reads it once, or else the first that holds it;
// -1 where there is none.
inline int choose_softmax_ring(const SoftmaxProblem& p) {
  int found = -1;
  for (int i = 0; i < kNumSoftmaxRings; ++i) {
    const SoftmaxRing& ring = kSoftmaxRings[i];
    if (p.n > ring.preferred_to(p.elem_size, p.backward) || softmax_refusal(p, ring)) continue;
    if (p.n <= ring.read_once_to(p.elem_size, p.backward, p.aligned)) return i;
    if (found < 0) found = i;
  }
  return found;
}

// NOTE: fewer threads with 8 accesses each take 0.99 of the time of 4 on an H200 for fp32 rows of
// 1025 to 4096 columns in the forward; longer rows, masks and 16 bits gain nothing.
constexpr int softmax_tile_loads_from(const SoftmaxProblem& p) {
  const bool single = p.elem_size == 4 && !p.backward && !p.masked;
  return single && p.n > 1024 && p.n <= 4096 ? 8 : 1;
}

inline int choose_softmax_tile(const SoftmaxProblem& p) {
  for (int i = 0; i < kNumSoftmaxTiles; ++i) {
    if (kSoftmaxTiles[i].loads < softmax_tile_loads_from(p)) continue;
    if (!softmax_refusal(p, kSoftmaxTiles[i])) return i;
  }
  return -1;
}

// 16-bit rows that are faster read twice than held.
constexpr bool softmax_reads_twice(const SoftmaxProblem& p) {
  return p.elem_size == 2 && !p.backward && p.aligned && p.in_phase &&
         p.n >= kSoftmaxReadTwiceFrom && p.n <= kSoftmaxReadTwiceTo;
}

inline SoftmaxChoice choose_softmax(const SoftmaxProblem& p) {
  if (softmax_reads_twice(p)) return {SoftmaxEngine::kStream, 0};
  const int ring = choose_softmax_ring(p), tile = choose_softmax_tile(p);
  const bool long_row = p.elem_size == 2 && p.n >= kSoftmaxRingFrom[p.backward];
  if (ring >= 0 && (tile < 0 || long_row)) return {SoftmaxEngine::kRing, ring};
  return tile >= 0 ? SoftmaxChoice{SoftmaxEngine::kTile, tile}
                   : SoftmaxChoice{SoftmaxEngine::kStream, 0};
}

}  // namespace torchweld
