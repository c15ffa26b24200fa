// Chooses the engine and the tile of a row softmax. This is pure host code. Tests run it without a
// GPU, and torchweld.explain prints its choice.
//
// There are three engines. The tile engine holds a row in registers. The ring engine holds a row in
// the shared memory of a cluster, and loads the next row while the current row is reduced and
// stored. The stream engine reads the row twice.
#pragma once

#include <cstdint>

#include "core/refusal.h"

namespace torchweld {

// The rows that a tile supports. kAll: all rows. kScores: in a forward with a mask, rows of 16-bit
// scores. kOthers: all rows except those of kScores.
enum class SoftmaxRows : int8_t { kAll, kScores, kOthers };

// A tile of the tile engine. The registers of up to `threads` threads hold a row. A thread makes
// `loads` 16-byte accesses. If rows are not aligned, a thread may also hold one element before or
// after the aligned accesses.
struct SoftmaxTile {
  int threads;
  int loads;
  SoftmaxRows rows;

  // The number of values per thread.
  constexpr int values(int elem_size) const { return loads * 16 / elem_size; }
  constexpr int64_t capacity(int elem_size, bool aligned) const {
    return static_cast<int64_t>(threads) * values(elem_size) + (aligned ? 0 : 16 / elem_size - 1);
  }
  // Returns the number of threads for a row of n elements. It is a multiple of 32.
  constexpr int threads_for(int64_t n, int elem_size) const {
    const int64_t accesses = n / (16 / elem_size);
    const int64_t wanted = ((accesses + loads - 1) / loads + 31) / 32 * 32;
    return wanted < threads ? static_cast<int>(wanted < 32 ? 32 : wanted) : threads;
  }
  // Whether threads keep the raw words of the row and compute the exponentials twice. They do so if
  // a thread has more than 32 values.
  constexpr bool recomputes(int elem_size) const { return values(elem_size) > 32; }
  constexpr bool supports(int elem_size, bool backward, bool masked) const {
    const bool scores = masked && elem_size == 2 && !backward;
    return rows == SoftmaxRows::kAll || (rows == SoftmaxRows::kScores) == scores;
  }
  // Whether the registers hold the row without spills.
  // NOTE: in the forward, tiles that are not for kScores could also hold more than 32 values per
  // thread. But then an SM would run only one block, and one block does not overlap loads with
  // math. In 16 bits at n = 65536, such a forward took 2.2 times as long as a copy of the matrix.
  // The streaming kernel needs 1.9 times the time of the copy.
  constexpr bool fits_registers(int elem_size, bool backward, bool masked) const {
    if (!supports(elem_size, backward, masked)) return false;
    if (!backward) return values(elem_size) <= 32 || rows == SoftmaxRows::kScores;
    return threads * (2 * values(elem_size) + 24) <= 65536;  // a thread holds y and dy in fp32
  }
};

// The tiles in order of preference. The first legal tile is chosen.
// NOTE: a causal row loads half of its scores on average, but stores all of them. With fewer
// threads per row and more accesses per thread, more rows are in flight. The times in 16 bits on an
// H200 are multiples of the time of a copy of the matrix. For n = 2048, 64 threads with 4 accesses
// need 0.78, and 128 threads with 2 accesses need 0.93. For n = 8192, 128 threads with 8 accesses
// need 0.80, and 256 threads with 4 accesses need 0.88. fp32 does not gain.
inline constexpr SoftmaxTile kSoftmaxTiles[] = {
    {32, 1, SoftmaxRows::kAll},    {32, 2, SoftmaxRows::kAll},     {32, 4, SoftmaxRows::kScores},
    {64, 2, SoftmaxRows::kOthers}, {64, 4, SoftmaxRows::kScores},  {128, 2, SoftmaxRows::kOthers},
    {128, 4, SoftmaxRows::kAll},   {128, 8, SoftmaxRows::kScores}, {256, 4, SoftmaxRows::kOthers},
    {512, 4, SoftmaxRows::kAll},   {512, 8, SoftmaxRows::kAll},    {1024, 4, SoftmaxRows::kAll},
    {1024, 8, SoftmaxRows::kAll}};
inline constexpr int kNumSoftmaxTiles = sizeof(kSoftmaxTiles) / sizeof(kSoftmaxTiles[0]);

// A configuration of the ring engine. The shared memory of `cluster` blocks holds a row, or most of
// a row that is longer than the ring. Each block has a ring of slots. A producer warp of the block
// fills the slots, and groups of consumer threads process rows in round-robin order. In the
// forward, a slot holds a chunk of x. In the backward, a slot holds a chunk of y and a chunk of dy.
struct SoftmaxRing {
  int cluster;
  // choose_softmax_ring() considers this ring only for rows of up to
  // 1024 * preferred[backward][elem_size == 4] columns.
  int preferred[2][2];

  static constexpr int kGroups = 3;
  static constexpr int kThreads = 256;  // the number of threads per group
  static constexpr int kLoads = 4;      // number of 16-byte accesses per thread and slot
  // An upper bound on the bytes of barriers and of the exchange between blocks.
  static constexpr int kExtraBytes = 2048;
  static constexpr int kSharedBytes = 227 * 1024;  // bytes per block; an SM runs one block

  constexpr int block_threads() const { return kGroups * kThreads + 32; }
  // The number of 16-byte accesses per thread and chunk.
  constexpr int accesses(bool backward) const { return kLoads / (backward ? 2 : 1); }
  constexpr int chunk_bytes(bool backward) const { return kThreads * accesses(backward) * 16; }
  constexpr int shared_bytes() const { return kSharedBytes; }
  // A cluster of more than 8 blocks is not portable. Only the backward gains from such a cluster.
  constexpr bool portable() const { return cluster <= 8; }
  constexpr bool supports(bool backward) const { return portable() || backward; }
  constexpr int slots() const { return (kSharedBytes - kExtraBytes) / (kThreads * kLoads * 16); }

  // read_once_to() is the maximum length of a row that the ring reads only once. capacity() is the
  // maximum length of a row that the ring supports. If the cluster is portable, the ring may read
  // some chunks of a longer row twice. Their number is at most a quarter of the number of slots.
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
  // The number of columns that fit into `chunks` chunks per block. If a row is unaligned, it begins
  // within a 16-byte access, so up to 16 / elem_size - 1 fewer columns fit.
  constexpr int64_t columns(int chunks, int elem_size, bool backward, bool aligned) const {
    return static_cast<int64_t>(cluster) * chunks * chunk_bytes(backward) / elem_size -
           (aligned ? 0 : 16 / elem_size - 1);
  }
};

// The rings in order of preference. choose_softmax_ring() chooses a ring. Measured on an H200 with
// rows of 16384 to 262144 columns: no other cluster size was faster than the chosen one. Other
// lengths in this range, and longer rows, were not measured. In a cluster of up to four blocks, a
// block holds at most 80 KiB of x, or of y and dy together. The backward uses at least two blocks.
// NOTE: 7 clusters of 16 blocks occupy 112 of 132 SMs and leave 20 idle. Clusters of 16 blocks are
// faster only for rows that don't fit in 8 blocks. A cluster of 8 blocks reads some chunks of these
// rows twice. With 16 blocks, the backward of 262144 fp32 columns needs 1.04 times the time to move
// its three tensors. With 8 blocks, it needs 1.13 times this time.
inline constexpr SoftmaxRing kSoftmaxRings[] = {{1, {{40, 20}, {0, 0}}},
                                                {2, {{80, 40}, {40, 20}}},
                                                {4, {{160, 80}, {80, 40}}},
                                                {8, {{1088, 544}, {544, 272}}},
                                                {16, {{0, 0}, {896, 448}}}};
inline constexpr int kNumSoftmaxRings = sizeof(kSoftmaxRings) / sizeof(kSoftmaxRings[0]);

// The number of threads of the streaming kernel.
inline constexpr int kSoftmaxStreamThreads = 512;

// The minimum length of 16-bit rows that prefer a ring to a tile: first for the forward, then for
// the backward. fp32 rows use a ring only if no tile can hold the row, because the largest tile is
// faster than a ring.
inline constexpr int64_t kSoftmaxRingFrom[2] = {32768, 16384};
// The range of lengths of 16-bit rows for which the forward prefers the stream engine.
// NOTE: 16-bit rows in this range would need a tile with more than 512 threads. An SM would then
// run only one block, and one block does not overlap loads with math. The stream engine reads the
// rows twice and needs 1.16 times the time of a copy. A tile needs 1.35 times the time of a copy.
inline constexpr int64_t kSoftmaxReadTwiceFrom = 16385, kSoftmaxReadTwiceTo = 24576;

struct SoftmaxProblem {
  int64_t n;      // the length of a row
  int elem_size;  // size of an element in bytes
  bool aligned;   // whether every row of the result starts on a 16-byte boundary
  bool backward = false;
  bool tiled = true;     // false if the mask needs the stream engine
  bool in_phase = true;  // whether a row has one offset from a 16-byte boundary in all tensors
  int64_t rows = 1;
  bool masked = false;
  bool bfloat16 = false;
  bool capped = false;  // true with softcap or a sink (MaskKind::kCapped)
  DeviceFacts device = {};
};

// kTile holds rows in registers. kRing holds rows in the shared memory of a cluster. kStream reads
// each row twice.
enum class SoftmaxEngine : int8_t { kTile, kRing, kStream };

struct SoftmaxChoice {
  SoftmaxEngine engine;
  int tile;  // index into kSoftmaxTiles or kSoftmaxRings, 0 for kStream
};

inline Refusal softmax_row_refusal(const SoftmaxProblem& p, int64_t capacity) {
  return p.n <= capacity ? Refusal() : Refusal("holds {} elements, the row has {}", capacity, p.n);
}

// Whether the call is a backward that needs the scores. A backward with softcap or a sink needs
// them. The scores do not fit into registers in addition to y and dy.
constexpr bool softmax_needs_scores(const SoftmaxProblem& p) { return p.capped && p.backward; }

// Returns the number of threads of the streaming kernel. For a backward with softcap or a sink,
// this is the number of 16-byte accesses of a row, rounded up to whole warps, but at most
// kSoftmaxStreamThreads. For all other calls, it is kSoftmaxStreamThreads.
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

// Returns the index of the first ring that supports the row, prefers the row's length and reads the
// row only once. If no ring does all three, returns the index of the first ring that supports the
// row and prefers the row's length. If there is no such ring either, returns -1.
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

// Returns the minimum of `loads` for choose_softmax_tile, which skips tiles with fewer accesses per
// thread.
// NOTE: for the forward of unmasked fp32 rows of 1025 to 4096 columns on an H200, tiles with 8
// accesses need 0.99 of the time of tiles with 4 accesses. Longer rows, masked rows and 16-bit rows
// do not gain.
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

// Whether the row is a 16-bit row for which the stream engine is faster than a tile.
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

// Returns the configuration for a call. This is a forced or a remembered configuration if there is
// one, else choose_softmax(p). pick.cpp defines the function, so that kernels need not include
// core/choices.h.
SoftmaxChoice pick_softmax(const SoftmaxProblem& p);

}  // namespace torchweld
