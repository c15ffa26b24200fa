// Chooses the engine and the tile of a row softmax. Pure host code: tested without a GPU, printed
// by explain.
//
// Three engines: a tile holds a row in registers; a ring holds it in the shared memory of a
// cluster, where the next row is loaded while this one is reduced and stored; a stream reads it
// twice.
#pragma once

#include <cstdint>

#include "core/family.h"

namespace torchweld {

// The rows that a tile supports: masked 16-bit scores in the forward, all other rows, or both.
enum class SoftmaxRows : int8_t { kAll, kScores, kOthers };

// A row is held in the registers of up to `threads` threads, with `loads` 16-byte accesses each. If
// rows are not aligned, a thread also holds one element before or after the aligned accesses.
struct SoftmaxTile {
  int threads;
  int loads;
  SoftmaxRows rows;

  constexpr int values(int elem_size) const { return loads * 16 / elem_size; }  // of a thread
  constexpr int64_t capacity(int elem_size, bool aligned) const {
    return static_cast<int64_t>(threads) * values(elem_size) + (aligned ? 0 : 16 / elem_size - 1);
  }
  // Threads that a row of n elements needs, a multiple of 32.
  constexpr int threads_for(int64_t n, int elem_size) const {
    const int64_t accesses = n / (16 / elem_size);
    const int64_t wanted = ((accesses + loads - 1) / loads + 31) / 32 * 32;
    return wanted < threads ? static_cast<int>(wanted < 32 ? 32 : wanted) : threads;
  }
  // With more than 32 values a thread keeps the raw words and computes the exponentials twice.
  constexpr bool recomputes(int elem_size) const { return values(elem_size) > 32; }
  constexpr bool supports(int elem_size, bool backward, bool masked) const {
    const bool scores = masked && elem_size == 2 && !backward;
    return rows == SoftmaxRows::kAll || (rows == SoftmaxRows::kScores) == scores;
  }
  // Whether the registers hold the row without spills.
  // NOTE: the forward could hold more than 32 values per thread, but then an SM runs one block,
  // which does not overlap loads with math: 2.2x a copy at n = 65536 in 16 bits; the streaming
  // kernel takes 1.9x.
  constexpr bool fits_registers(int elem_size, bool backward, bool masked) const {
    if (!supports(elem_size, backward, masked)) return false;
    if (!backward) return values(elem_size) <= 32 || rows == SoftmaxRows::kScores;
    return threads * (2 * values(elem_size) + 24) <= 65536;  // y and dy in fp32
  }
};

// Sorted by preference: the first legal tile is chosen.
// NOTE: a causal row loads half of its scores on average, but stores all of them. Fewer threads
// with 4 accesses each keep more rows in flight: 0.78 of a copy of the matrix in 16 bits at n =
// 2048 on an H200 instead of 0.93. 128 threads with 8 accesses: 0.80 at 8192 instead of 0.88. fp32
// does not gain.
inline constexpr SoftmaxTile kSoftmaxTiles[] = {
    {32, 1, SoftmaxRows::kAll},    {32, 2, SoftmaxRows::kAll},     {32, 4, SoftmaxRows::kScores},
    {64, 2, SoftmaxRows::kOthers}, {64, 4, SoftmaxRows::kScores},  {128, 2, SoftmaxRows::kOthers},
    {128, 4, SoftmaxRows::kAll},   {128, 8, SoftmaxRows::kScores}, {256, 4, SoftmaxRows::kOthers},
    {512, 4, SoftmaxRows::kAll},   {512, 8, SoftmaxRows::kAll},    {1024, 4, SoftmaxRows::kAll},
    {1024, 8, SoftmaxRows::kAll}};
inline constexpr int kNumSoftmaxTiles = sizeof(kSoftmaxTiles) / sizeof(kSoftmaxTiles[0]);

// A row is held in the shared memory of `cluster` blocks, as a ring of slots. One producer warp
// fills the slots; consumer groups of threads process rows round-robin. A slot holds a chunk of x,
// or a chunk of y and one of dy.
struct SoftmaxRing {
  int cluster;
  int preferred[2][2];  // limit in 1024 columns: [backward][4-byte elements]

  static constexpr int kGroups = 3;
  static constexpr int kThreads = 256;             // per group
  static constexpr int kLoads = 4;                 // 16-byte accesses of a thread per slot
  static constexpr int kExtraBytes = 2048;         // barriers and the exchange between blocks
  static constexpr int kSharedBytes = 227 * 1024;  // of a block; one block per SM

  constexpr int block_threads() const { return kGroups * kThreads + 32; }
  constexpr int accesses(bool backward) const { return kLoads / (backward ? 2 : 1); }  // per chunk
  constexpr int chunk_bytes(bool backward) const { return kThreads * accesses(backward) * 16; }
  constexpr int shared_bytes() const { return kSharedBytes; }
  // Clusters above 8 are not portable; only the gradient gains by them.
  constexpr bool portable() const { return cluster <= 8; }
  constexpr bool supports(bool backward) const { return portable() || backward; }
  constexpr int slots() const { return (kSharedBytes - kExtraBytes) / (kThreads * kLoads * 16); }

  // The longest row that is read once. capacity() is the longest row: a portable cluster reads up
  // to a quarter of its slots twice.
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
  // Columns that fit into `chunks` chunks per block. Unaligned rows lose the unaligned elements.
  constexpr int64_t columns(int chunks, int elem_size, bool backward, bool aligned) const {
    return static_cast<int64_t>(cluster) * chunks * chunk_bytes(backward) / elem_size -
           (aligned ? 0 : 16 / elem_size - 1);
  }
};

// Sorted by preference: choose_softmax_ring() picks the first ring that prefers the row length and
// reads the row once, else the first that holds it. The cluster sizes are the fastest ones, or as
// fast, on an H200 at 16384 to 262144 columns: a block holds at most 80 KiB until the cluster size
// is at its limit, and the gradient uses at least two blocks. The bounds in between, and longer
// rows, were not measured.
// NOTE: 7 clusters of 16 leave 20 of 132 SMs idle. They pay only if 8 blocks would read chunks
// twice: 1.04 of moving three tensors in the gradient of fp32 rows of 262144, against 1.13.
inline constexpr SoftmaxRing kSoftmaxRings[] = {{1, {{40, 20}, {0, 0}}},
                                                {2, {{80, 40}, {40, 20}}},
                                                {4, {{160, 80}, {80, 40}}},
                                                {8, {{1088, 544}, {544, 272}}},
                                                {16, {{0, 0}, {896, 448}}}};
inline constexpr int kNumSoftmaxRings = sizeof(kSoftmaxRings) / sizeof(kSoftmaxRings[0]);

// Threads of the streaming kernel.
inline constexpr int kSoftmaxStreamThreads = 512;

// The length from which 16-bit rows prefer a ring: [backward]. Other rows use a ring only if no
// tile holds them: for fp32 the largest tile is faster.
inline constexpr int64_t kSoftmaxRingFrom[2] = {32768, 16384};
// NOTE: 16-bit rows in this range need more than 512 threads, so an SM runs one block, which does
// not overlap loads with math. Reading them twice is faster (1.16x a copy against 1.35x).
inline constexpr int64_t kSoftmaxReadTwiceFrom = 16385, kSoftmaxReadTwiceTo = 24576;

struct SoftmaxProblem {
  int64_t n;      // row length
  int elem_size;  // bytes
  bool aligned;   // every row of the result is 16-byte aligned
  bool backward = false;
  bool tiled = true;     // false if the mask needs the streaming kernel
  bool in_phase = true;  // a row has the same offset from a 16-byte boundary in every tensor
  int64_t rows = 1;
  bool masked = false;
  bool bfloat16 = false;
  bool capped = false;  // softcap or a sink: see MaskKind::kCapped
  DeviceFacts device = {};
};

// kTile: rows in registers. kRing: rows in the shared memory of a cluster. kStream: rows read
// twice.
enum class SoftmaxEngine : int8_t { kTile, kRing, kStream };

struct SoftmaxChoice {
  SoftmaxEngine engine;
  int tile;  // index into kSoftmaxTiles or kSoftmaxRings, 0 for kStream
};

inline Refusal softmax_row_refusal(const SoftmaxProblem& p, int64_t capacity) {
  return p.n <= capacity ? Refusal() : Refusal("holds {} elements, the row has {}", capacity, p.n);
}

// With softcap or a sink the gradient also reads the scores, which do not fit into registers.
constexpr bool softmax_needs_scores(const SoftmaxProblem& p) { return p.capped && p.backward; }

// Threads of the streaming kernel: in the gradient with softcap or a sink, at most one per access.
constexpr int softmax_stream_threads(const SoftmaxProblem& p) {
  const int64_t accesses = (p.n + 16 / p.elem_size - 1) / (16 / p.elem_size);
  const bool fits = softmax_needs_scores(p) && accesses < kSoftmaxStreamThreads;
  return fits ? static_cast<int>((accesses + 31) / 32 * 32) : kSoftmaxStreamThreads;
}

inline Refusal softmax_refusal(const SoftmaxProblem& p, const SoftmaxTile& tile) {
  if (softmax_needs_scores(p)) return "no registers for the scores, which softcap or a sink needs";
  if (!p.tiled) return "the rows need 64-bit indices or the scale is 0";
  if (!tile.supports(p.elem_size, p.backward, p.masked)) {
    return tile.rows == SoftmaxRows::kScores ? "for 16-bit scores under a mask"
                                             : "16-bit scores under a mask have other tiles";
  }
  if (!tile.fits_registers(p.elem_size, p.backward, p.masked))
    return "too many registers for this dtype";
  return softmax_row_refusal(p, tile.capacity(p.elem_size, p.aligned));
}

inline Refusal softmax_refusal(const SoftmaxProblem& p, const SoftmaxRing& ring) {
  if (p.capped) return "softcap and sinks are not supported";
  constexpr int64_t kMaxRows = int64_t{1} << 30;  // rings count rows in 32 bits
  if (!p.tiled) return "the rows need 64-bit indices or the scale is 0";
  if (!ring.supports(p.backward)) return "for the gradient alone";
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

// Index of the first ring that prefers the row length and reads the row once, else of the first
// that holds it, else -1.
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

// The minimum accesses per thread.
// NOTE: 8 accesses take 0.99 of the time of 4 for unmasked fp32 rows of 1025 to 4096 columns in the
// forward on an H200; longer rows, masks and 16 bits do not gain.
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

// Whether the row is a 16-bit one that is faster read twice than held in registers.
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
