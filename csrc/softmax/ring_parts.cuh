// Building blocks of the ring kernels: the pipeline state, the slice of a row that a block
// processes, the exchange between the blocks of a cluster, and the zeros in masked columns.
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
  static constexpr int kThreads = kShape.kThreads;  // the number of threads per group
  // The number of threads that compute, that is, all threads except the producer warp.
  static constexpr int kComputing = kGroups * kThreads;
  static constexpr int kBlockThreads = kShape.block_threads();
  static constexpr int kCluster = kShape.cluster;
  static constexpr int kAccesses = kShape.accesses(kBackward);
  static constexpr int kSlots = kShape.slots();
  static constexpr int kChunkBytes = kShape.chunk_bytes(kBackward);
  static constexpr int kChunkAccesses = kChunkBytes / kVectorBytes;
  static constexpr int kElems = kVectorBytes / sizeof(T);
  static_assert(kSlots >= 2 && kThreads > kElems && kThreads >= kCluster);
};

// The pipeline state: a slot and its phase parity in one word.
template <int kSlots>
struct RingState {
  uint32_t bits = 0;

  TW_HOST_DEVICE int slot() const { return static_cast<int>(bits / 2); }
  TW_HOST_DEVICE uint32_t parity() const { return bits % 2; }
  TW_HOST_DEVICE void advance() {
    bits += 2;
    if (bits >= 2 * kSlots) bits = bits % 2 ^ 1;
  }
};

// The slice of a row that a block processes. The accesses of the row that have a live column are
// divided among the blocks of the cluster.
template <int kElems, int kCluster, int kChunkAccesses>
struct RingSlice {
  int begin, end;  // the range of the row's live columns
  int accesses;    // the number of 16-byte accesses of this block
  int chunks;      // number of chunks per block, at least 1; some may be empty
  int column;      // first column of the first access; may precede the live columns

  // phase is the offset of column 0 from a 16-byte boundary, in elements.
  TW_HOST_DEVICE RingSlice(const KeyRange32& live, int phase, int rank)
      : begin(live.begin < live.end ? live.begin : 0), end(live.begin < live.end ? live.end : 0) {
    const int before = (begin + phase) % kElems;
    const int total = end == 0 ? 0 : (before + end - begin + kElems - 1) / kElems;
    // All slices but the last have a size that is a multiple of 128 bytes (8 accesses).
    const int slice_accesses = (total + 8 * kCluster - 1) / (8 * kCluster) * 8;
    const int left = total - rank * slice_accesses;
    accesses = left < 0 ? 0 : (left < slice_accesses ? left : slice_accesses);
    chunks = total == 0 ? 1 : (slice_accesses + kChunkAccesses - 1) / kChunkAccesses;
    column = begin - before + rank * slice_accesses * kElems;
  }

  // Whether the chunk that starts after `done` accesses is complete and all its columns are live.
  TW_HOST_DEVICE bool full(int done) const {
    const int first = column + done * kElems;
    return done + kChunkAccesses <= accesses && first >= begin &&
           first + kChunkAccesses * kElems <= end;
  }
  TW_HOST_DEVICE bool is_live(int access) const {
    const int first = column + access * kElems;
    return first >= begin && first + kElems <= end;
  }
  TW_HOST_DEVICE bool sees(int column) const { return column >= begin && column < end; }
};

// A row that a cluster has claimed, and the pipeline state of the row's first chunk.
template <typename State>
struct RingClaim {
  int64_t row;
  State state;

  // Packs a claim into two 32-bit words.
  static __device__ __forceinline__ float2 pack(uint32_t row, const State& state) {
    return make_float2(__uint_as_float(row), __uint_as_float(state.bits));
  }
  __device__ __forceinline__ explicit RingClaim(float2 packed) {
    row = __float_as_uint(packed.x);
    state.bits = __float_as_uint(packed.y);
  }
};

// Reduces one value per thread, in a fixed order: first over the kThreads threads of a group, then
// over the groups with the same index in all blocks of the cluster. `iteration` is the number of
// earlier calls by the group.
template <int kThreads, int kGroups, int kCluster>
struct RingExchange {
  BlockExchange<kThreads, kGroups> s_warps[2];
  float2 s_partials[2][kCluster];  // a partial result from every block of the cluster
  uint64_t s_arrived[2];

#if TW_HAS_CLUSTERS
  __device__ __forceinline__ void init() {
    for (int i = 0; i < 2; ++i) mbarrier_init(&s_arrived[i], 1);
  }

  template <typename Exponent>
  __device__ __forceinline__ MaxSum merge(MaxSum x, const Exponent& exponent, int iteration) {
    x = s_warps[iteration % 2].merge_warps(warp_merge(x, exponent), exponent);
    if constexpr (kCluster == 1) return x;
    float2 partials[kCluster];
    gather(partials, make_float2(x.max, x.sum), iteration);
    float max = partials[0].x;
#pragma unroll
    for (int b = 1; b < kCluster; ++b) max = fmaxf(max, partials[b].x);
    float sum = 0.f;
#pragma unroll
    for (int b = 0; b < kCluster; ++b)
      sum += rescaled_sum({partials[b].x, partials[b].y}, max, exponent);
    return {max, sum};
  }

  __device__ __forceinline__ float sum(float x, int iteration) {
    x = s_warps[iteration % 2].sum_warps(warp_sum(x));
    if constexpr (kCluster == 1) return x;
    float2 partials[kCluster];
    gather(partials, make_float2(x, 0.f), iteration);
    float sum = 0.f;
#pragma unroll
    for (int b = 0; b < kCluster; ++b) sum += partials[b].x;
    return sum;
  }

 private:
  // Gathers one value from every block of the cluster. partials[b] is the value of the block with
  // rank b.
  __device__ __forceinline__ void gather(float2 (&partials)[kCluster], float2 local,
                                         int iteration) {
    const int i = iteration % 2, thread = threadIdx.x % kThreads;
    // NOTE: two buffers suffice. A block sends its value of iteration n + 2 only after all blocks
    // have sent their values of iteration n + 1. Each block has read the values of iteration n
    // before it sends its value of iteration n + 1.
    if (thread == 0) mbarrier_arrive_expect_tx(&s_arrived[i], sizeof(float2) * kCluster);
    if (thread < kCluster) {
      send_to_block(&s_partials[i][blockIdx.x % kCluster], local, &s_arrived[i], thread);
    }
    mbarrier_wait(&s_arrived[i], iteration / 2 % 2);
#pragma unroll
    for (int b = 0; b < kCluster; ++b) partials[b] = s_partials[i][b];
  }
#endif
};

// Sets columns [from, to) of a row to zero. One group of every block of the cluster calls this
// function.
template <typename Config>
__device__ __forceinline__ void clear_columns(typename Config::T* g_row, int64_t from, int64_t to,
                                              int rank) {
  using T = typename Config::T;
  constexpr int kElems = Config::kElems, kStride = Config::kCluster * Config::kThreads;
  const int thread = rank * Config::kThreads + threadIdx.x % Config::kThreads;
  const int past = static_cast<int>(reinterpret_cast<uintptr_t>(g_row + from) % kVectorBytes);
  const int64_t first = min(to, from + (kVectorBytes - past) % kVectorBytes / int{sizeof(T)});
  const int64_t last = to - (to - first) % kElems;
  const T zero = from_float<T>(0.f);
  if (thread < first - from) g_row[from + thread] = zero;
  if (thread < to - last) g_row[last + thread] = zero;
  for (int64_t i = first + int64_t{thread} * kElems; i < last; i += kStride * kElems) {
    store_vec(g_row + i, Vec<T, kElems>{});
  }
}

}  // namespace torchweld
