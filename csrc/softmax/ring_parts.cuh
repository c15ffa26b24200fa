// What the rings of softmax and of its gradient share: places in a ring, what the blocks of a
// cluster tell each other, and the columns that a mask hides.
#pragma once

#include "device/features.cuh"
#include "device/sm90/bulk.cuh"
#include "softmax/config.h"
#include "softmax/parts.cuh"

namespace torchweld {

template <typename T_, int kRing, bool kBackward_>
struct RingConfig {
  using T = T_;
  static constexpr SoftmaxRing kShape = kSoftmaxRings[kRing];
  static constexpr bool kBackward = kBackward_;
  static constexpr int kInputs = kBackward ? 2 : 1;
  static constexpr int kGroups = kShape.kGroups;
  static constexpr int kThreads = kShape.kThreads;       // of a group
  static constexpr int kComputing = kGroups * kThreads;  // without the copying warp
  static constexpr int kBlockThreads = kShape.block_threads();
  static constexpr int kCluster = kShape.cluster;
  static constexpr int kAccesses = kShape.accesses(kBackward);
  static constexpr int kSlots = kShape.slots();
  static constexpr int kPieceBytes = kShape.piece_bytes(kBackward);
  static constexpr int kPieceAccesses = kPieceBytes / kVectorBytes;
  static constexpr int kElems = kVectorBytes / sizeof(T);
  static_assert(kSlots >= 2 && kThreads > kElems && kThreads >= kCluster);
};

// A place in the ring, and the parity of its turn, in one word.
template <int kSlots>
struct RingPlace {
  uint32_t where = 0;

  TW_HOST_DEVICE int slot() const { return static_cast<int>(where / 2); }
  TW_HOST_DEVICE uint32_t parity() const { return where % 2; }
  TW_HOST_DEVICE void advance() {
    where += 2;
    if (where >= 2 * kSlots) where = where % 2 ^ 1;
  }
};

// The accesses that hold the live columns of a row, as one block of a cluster sees them.
template <int kElems, int kCluster, int kPieceAccesses>
struct RingPart {
  int begin, end;  // the live columns
  int accesses;    // of this block
  int pieces;      // of every block, some of them maybe empty; at least one
  int column;      // of the first access, which may begin before the live columns

  // `phase` is the distance of column 0 from a 16-byte boundary, in elements.
  TW_HOST_DEVICE RingPart(const RowRange& live, int phase, int rank)
      : begin(live.begin < live.end ? live.begin : 0), end(live.begin < live.end ? live.end : 0) {
    const int before = (begin + phase) % kElems;
    const int total = end == 0 ? 0 : (before + end - begin + kElems - 1) / kElems;
    // Shares are whole lines of 128 bytes.
    const int share = (total + 8 * kCluster - 1) / (8 * kCluster) * 8;
    const int left = total - rank * share;
    accesses = left < 0 ? 0 : (left < share ? left : share);
    pieces = total == 0 ? 1 : (share + kPieceAccesses - 1) / kPieceAccesses;
    column = begin - before + rank * share * kElems;
  }

  // True where every access of the piece that begins after `done` accesses is there and live.
  TW_HOST_DEVICE bool full(int done) const {
    const int first = column + done * kElems;
    return done + kPieceAccesses <= accesses && first >= begin &&
           first + kPieceAccesses * kElems <= end;
  }
  TW_HOST_DEVICE bool whole(int access) const {
    const int first = column + access * kElems;
    return first >= begin && first + kElems <= end;
  }
  TW_HOST_DEVICE bool sees(int at) const { return at >= begin && at < end; }
};

// A row that a cluster has claimed, and where its pieces begin.
template <typename Place>
struct RingClaim {
  int64_t row;
  Place place;

  // Sent as a pair of words.
  static __device__ __forceinline__ float2 told(uint32_t row, const Place& place) {
    return make_float2(__uint_as_float(row), __uint_as_float(place.where));
  }
  __device__ __forceinline__ explicit RingClaim(float2 told) {
    row = __float_as_uint(told.x);
    place.where = __float_as_uint(told.y);
  }
};

// Joins a row's values over the kThreads threads of a group and the blocks of a cluster, the same
// bits in every run. `turn` counts the group's calls.
template <int kThreads, int kGroups, int kCluster>
struct RingExchange {
  BlockExchange<kThreads, kGroups> s_warps[2];
  float2 s_parts[2][kCluster];  // from every block of the cluster
  uint64_t s_arrived[2];

#if TW_HAS_CLUSTERS
  __device__ __forceinline__ void init() {
    for (int i = 0; i < 2; ++i) mbarrier_init(&s_arrived[i], 1);
  }

  template <typename Exponent>
  __device__ __forceinline__ MaxSum merge(MaxSum x, const Exponent& exponent, int turn) {
    x = s_warps[turn % 2].merge_warps(warp_merge(x, exponent), exponent);
    if constexpr (kCluster == 1) return x;
    float2 parts[kCluster];
    gather(parts, make_float2(x.max, x.sum), turn);
    float max = parts[0].x;
#pragma unroll
    for (int b = 1; b < kCluster; ++b) max = fmaxf(max, parts[b].x);
    float sum = 0.f;
#pragma unroll
    for (int b = 0; b < kCluster; ++b) sum += rescaled_sum({parts[b].x, parts[b].y}, max, exponent);
    return {max, sum};
  }

  __device__ __forceinline__ float sum(float x, int turn) {
    x = s_warps[turn % 2].sum_warps(warp_sum(x));
    if constexpr (kCluster == 1) return x;
    float2 parts[kCluster];
    gather(parts, make_float2(x, 0.f), turn);
    float sum = 0.f;
#pragma unroll
    for (int b = 0; b < kCluster; ++b) sum += parts[b].x;
    return sum;
  }

 private:
  // Every block's value, in the order of the ranks.
  __device__ __forceinline__ void gather(float2 (&parts)[kCluster], float2 mine, int turn) {
    const int i = turn % 2, me = threadIdx.x % kThreads;
    // NOTE: a block sends its value of the next turn but one only when it has everyone's of the
    // next turn, which they send after reading this turn's; two places are enough.
    if (me == 0) mbarrier_arrive_expect_tx(&s_arrived[i], sizeof(float2) * kCluster);
    if (me < kCluster) {
      send_to_block(&s_parts[i][blockIdx.x % kCluster], mine, &s_arrived[i], me);
    }
    mbarrier_wait(&s_arrived[i], turn / 2 % 2);
#pragma unroll
    for (int b = 0; b < kCluster; ++b) parts[b] = s_parts[i][b];
  }
#endif
};

// Zeros in the columns [from, to) of a row, by a group of every block of the cluster.
template <typename Config>
__device__ __forceinline__ void clear_columns(typename Config::T* g_row, int64_t from, int64_t to,
                                              int rank) {
  using T = typename Config::T;
  constexpr int kElems = Config::kElems, kAll = Config::kCluster * Config::kThreads;
  const int me = rank * Config::kThreads + threadIdx.x % Config::kThreads;
  const int past = static_cast<int>(reinterpret_cast<uintptr_t>(g_row + from) % kVectorBytes);
  const int64_t first = min(to, from + (kVectorBytes - past) % kVectorBytes / int{sizeof(T)});
  const int64_t last = to - (to - first) % kElems;
  const T zero = from_float<T>(0.f);
  if (me < first - from) g_row[from + me] = zero;
  if (me < to - last) g_row[last + me] = zero;
  for (int64_t i = first + int64_t{me} * kElems; i < last; i += kAll * kElems) {
    store_vec(g_row + i, Vec<T, kElems>{});
  }
}

}  // namespace torchweld
