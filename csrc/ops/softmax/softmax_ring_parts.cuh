// What the rings of softmax and of its gradient share: places in a ring, what the blocks of a
// cluster tell each other, and the columns that a mask hides.
#pragma once

#include "device/sm90/bulk.cuh"
#include "ops/softmax/softmax_config.h"
#include "ops/softmax/softmax_parts.cuh"

namespace torchweld {

template <typename T_, int kRing, bool kBackward_>
struct RingConfig {
  using T = T_;
  static constexpr SoftmaxRing kShape = kSoftmaxRings[kRing];
  static constexpr bool kBackward = kBackward_;
  static constexpr int kGroups = kShape.groups(kBackward);
  static constexpr int kThreads = kShape.threads(kBackward);  // of a group
  static constexpr int kComputing = kGroups * kThreads;       // without the copying warp
  static constexpr int kBlockThreads = kShape.block_threads(kBackward);
  static constexpr int kCluster = kShape.cluster;
  static constexpr int kAccesses = kShape.accesses(kBackward);
  static constexpr int kSlots = kShape.slots(kBackward);
  static constexpr int kPieceBytes = kShape.piece_bytes(kBackward);
  static constexpr int kPieceAccesses = kPieceBytes / kVectorBytes;
  static constexpr int kElems = kVectorBytes / sizeof(T);
  static_assert(kSlots >= 2 && kThreads >= 2 * kElems && kThreads > kCluster);
};

// A place in the ring, and the parity of its turn.
template <int kSlots>
struct RingPlace {
  int slot = 0;
  uint32_t parity = 0;

  TW_HOST_DEVICE void advance() {
    if (++slot == kSlots) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// Joins a row's values over the kThreads threads of a group and the blocks of a cluster, the same
// bits in every run. `turn` counts the group's calls.
template <int kThreads, int kCluster>
struct RingExchange {
  BlockExchange<kThreads, /*kWholeBlock=*/false> s_warps[2];
  float2 s_parts[2][kCluster];  // from every block of the cluster
  uint64_t s_arrived[2];

#if TW_HAS_CLUSTERS
  __device__ __forceinline__ void init() {
    for (int i = 0; i < 2; ++i) barrier_init(&s_arrived[i], 1);
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
    if (me == 0) barrier_expect(&s_arrived[i], sizeof(float2) * kCluster);
    if (me < kCluster) {
      send_to_block(&s_parts[i][blockIdx.x % kCluster], mine, &s_arrived[i], me);
    }
    barrier_wait(&s_arrived[i], turn / 2 % 2);
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

#if TW_HAS_CLUSTERS
// A slot is full when its copies have arrived, and empty when a group's warps have given it back.
template <typename Config, typename Shared>
__device__ __forceinline__ void init_slots(Shared& s) {
  for (int i = 0; i < Config::kSlots; ++i) {
    barrier_init(&s.s_full[i], 1);
    barrier_init(&s.s_empty[i], Config::kThreads / kWarp);
  }
}

// The warp has read the piece.
template <typename Shared>
__device__ __forceinline__ void give_back_slot(Shared& s, int slot) {
  __syncwarp();
  if (threadIdx.x % kWarp == 0) barrier_arrive(&s.s_empty[slot]);
}

// What every block does: one thread of the last warp copies, the groups compute.
template <typename Config, typename Job, typename Copy>
__device__ __forceinline__ void run_ring(const Job& job, const Copy& copy) {
  if (threadIdx.x == 0) job.init();
  __syncthreads();
  if constexpr (Config::kCluster > 1) {
    cluster_arrive();
    cluster_wait();
  }
  if (threadIdx.x >= Config::kComputing) {
    if (threadIdx.x == Config::kComputing) copy();
    __syncwarp();
  } else {
    job.compute();
  }
  // A block's shared memory outlives what its neighbours send there.
  if constexpr (Config::kCluster > 1) {
    cluster_arrive();
    cluster_wait();
  }
}
#endif

}  // namespace torchweld
