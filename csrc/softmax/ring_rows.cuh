// The scheduling of rows in the ring kernels of softmax and its backward.
//
// Blocks are persistent. The blocks of a cluster process each row together. A cluster claims its
// next row from a counter as soon as its ring has a free slot. A static schedule of rows was 6 %
// slower, because the other clusters waited for the slowest cluster. One warp per block is the
// producer. It copies chunks of the live columns into the ring while slots are free. The consumer
// groups process rows in round-robin order. A group reduces each chunk when the chunk arrives. Then
// it reduces the result over the warps of the group and over the cluster. Then it reads the chunks
// again, stores the results and releases the slots. While one group reduces, another group waits
// for the cluster or stores, and the copies of later rows are in flight. All times were measured
// with softmax (2048, 65536) bfloat16.
//
// If a row is longer than the ring, its first chunks are released at once and copied again after
// the last chunk. The second copy can't deadlock, because the producer fills the slots in order. A
// row need not be aligned: it is copied in 16-byte accesses, and elements outside of the row are
// ignored.
#pragma once

#include "core/device.h"
#include "core/launch.h"
#include "device/features.cuh"
#include "softmax/ring_parts.cuh"

namespace torchweld {

// The number of buffers for claims. A claim is a row that the cluster has claimed.
// NOTE: every row has at least one chunk, so at most kSlots rows are in the ring. A buffer is
// reused only after the groups of every block have read it.
template <int kSlots, int kGroups>
constexpr int kRingClaims = (kSlots + kGroups + 15) / 16 * 16;

template <typename Config>
struct RingShared {
  using T = typename Config::T;
  static constexpr int kClaims = kRingClaims<Config::kSlots, Config::kGroups>;
  alignas(128) T s_slots[Config::kSlots][Config::kInputs][Config::kChunkBytes / sizeof(T)];
  RingExchange<Config::kThreads, Config::kGroups, Config::kCluster> s_exchange[Config::kGroups];
  uint64_t s_full[Config::kSlots], s_empty[Config::kSlots];
  float2 s_claims[kClaims];
  uint64_t s_claimed[kClaims];
};

// Returns the grid of a ring. It has at most as many clusters as can run at the same time.
template <typename Config>
Grid ring_grid(int64_t rows) {
  constexpr int kBytes = sizeof(RingShared<Config>);
  static_assert(kBytes <= Config::kShape.shared_bytes());
  const int64_t max_clusters = device_facts().max_active_clusters(Config::kCluster);
  Grid grid((rows < max_clusters ? rows : max_clusters) * Config::kCluster, Config::kBlockThreads,
            kBytes);
  grid.cluster = Config::kCluster;
  return grid;
}

#if TW_HAS_CLUSTERS
// The row that a group processes: the slice of the row that belongs to this block, and the pipeline
// state of the slice's first chunk.
template <typename Slice, typename State, typename T>
struct RingRow {
  int64_t row;
  Slice slice;
  State state;
  T* g_to;        // address of the results of the first access
  int iteration;  // number of rows that the group has processed
};

template <typename Config_, typename Mask_>
struct RingRows {
  using Config = Config_;
  using Mask = Mask_;
  using T = typename Config::T;
  using Shared = RingShared<Config>;
  static constexpr int kElems = Config::kElems;
  static constexpr int kChunk = Config::kChunkAccesses;
  static constexpr int kCount =
      Config::kAccesses * kElems;  // number of values per thread and chunk
  static constexpr int kClaims = Shared::kClaims;
  using Slice = RingSlice<kElems, Config::kCluster, kChunk>;
  using State = RingState<Config::kSlots>;
  using Claim = RingClaim<State>;
  using Row = RingRow<Slice, State, T>;

  const RowArgs<T>& args;
  const Mask& mask;
  Shared& s;
  int rank;

  __device__ __forceinline__ RingRows(const RowArgs<T>& args, const Mask& mask, Shared& s)
      : args(args), mask(mask), s(s), rank(blockIdx.x % Config::kCluster) {}

  __device__ __forceinline__ Slice slice(int64_t row) const {
    const auto address = reinterpret_cast<uintptr_t>(args.g_y + row * args.n);
    // One launch of a ring covers all rows, so `row` needs no offset: args.first_row is 0.
    return Slice(mask.live_columns(row), static_cast<int>(address % kVectorBytes / sizeof(T)),
                 rank);
  }

  // Initialises the barriers of the slots. s_full completes when the copies to the slot have
  // arrived. s_empty completes when all warps of a group have released the slot.
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < Config::kSlots; ++i) {
      mbarrier_init(&s.s_full[i], 1);
      mbarrier_init(&s.s_empty[i], Config::kThreads / kWarp);
    }
    for (int i = 0; i < Config::kGroups; ++i) s.s_exchange[i].init();
    for (int i = 0; i < kClaims; ++i) mbarrier_init(&s.s_claimed[i], 1);
    // The first row of a cluster needs no claim.
    s.s_claims[0] = Claim::pack(blockIdx.x / Config::kCluster, State());
    mbarrier_arrive(&s.s_claimed[0]);
    mbarrier_init_fence();
  }

  __device__ __forceinline__ Claim wait_for_claim(int iteration) const {
    mbarrier_wait(&s.s_claimed[iteration % kClaims], iteration / kClaims % 2);
    return Claim(s.s_claims[iteration % kClaims]);
  }

  // Publishes a claim to all blocks of the cluster. The producer of every block of the cluster
  // calls this function. The block with rank 0 sends the claim.
  __device__ __forceinline__ void publish_claim(int iteration, uint32_t row,
                                                const State& state) const {
    const int i = iteration % kClaims;
    const float2 packed = Claim::pack(row, state);
    if constexpr (Config::kCluster == 1) {
      s.s_claims[i] = packed;
      mbarrier_arrive(&s.s_claimed[i]);
    } else {
      mbarrier_arrive_expect_tx(&s.s_claimed[i], sizeof(float2));
      if (rank != 0) return;
      for (int b = 0; b < Config::kCluster; ++b) {
        send_to_block(&s.s_claims[i], packed, &s.s_claimed[i], b);
      }
    }
  }

  // Claims the next row from the counter, in the block with rank 0.
  // NOTE: the counter wraps to 0 after args.rows claims. The clusters together make exactly
  // args.rows claims. Every row is claimed once, except the first row of each cluster, which needs
  // no claim. In addition, each cluster makes one claim that finds no row.
  __device__ __forceinline__ uint32_t claim_next(unsigned* g_claims) const {
    if (rank != 0) return 0;
    return gridDim.x / Config::kCluster + atomicInc(g_claims, static_cast<uint32_t>(args.rows - 1));
  }

  // Runs the producer thread. It copies the chunks of all rows in order. It copies each chunk as
  // soon as a slot is free.
  __device__ __forceinline__ void copy(unsigned* g_claims) const {
    State state;
    for (int iteration = 0;; ++iteration) {
      const int64_t row = wait_for_claim(iteration).row;
      if (row >= args.rows) {
        // Publish the end of the rows to the other groups, too.
        for (int g = 1; g < Config::kGroups; ++g) {
          publish_claim(iteration + g, static_cast<uint32_t>(args.rows), state);
        }
        return;
      }
      const uint32_t next = claim_next(g_claims);
      const Slice p = slice(row);
      for (int i = 0; i < p.chunks + recopied_chunks(p); ++i, state.advance()) {
        const int done = (i < p.chunks ? i : i - p.chunks) * kChunk;
        mbarrier_wait(&s.s_empty[state.slot()], state.parity() ^ 1);
        copy_chunk(state.slot(), row, p.column + done * kElems,
                   max(0, min(kChunk, p.accesses - done)));
      }
      publish_claim(iteration + 1, next, state);
    }
  }

  __device__ __forceinline__ void copy_chunk(int slot, int64_t row, int column,
                                             int accesses) const {
    BulkCopy copies[Config::kInputs];
    uint32_t bytes = 0;
    bool edges = false;
#pragma unroll
    for (int k = 0; k < Config::kInputs; ++k) {
      copies[k] =
          copy_edges(s.s_slots[slot][k], k == 0 ? args.g_x : args.g_dy,
                     k == 0 ? args.x_row_stride : args.dy_row_stride, row, column, accesses);
      bytes += copies[k].bytes;
      edges |= copies[k].bytes != accesses * kVectorBytes;
    }
    // Order the stores of copy_edges before the later bulk copy that overwrites the slot.
    if (edges) async_fence();
    mbarrier_arrive_expect_tx(&s.s_full[slot], bytes);
#pragma unroll
    for (int k = 0; k < Config::kInputs; ++k) {
      const BulkCopy& w = copies[k];
      if (w.bytes > 0) bulk_load(w.s_to, w.g_from, w.bytes, &s.s_full[slot]);
    }
  }

  // The arguments of a bulk copy: the accesses of a chunk that lie entirely inside of the tensor.
  struct BulkCopy {
    T* s_to;
    const T* g_from;
    int bytes;
  };

  // Copies the accesses that cross the bounds of the tensor, element by element. Returns the other
  // accesses of the chunk.
  __device__ __forceinline__ BulkCopy copy_edges(T* s_to, const T* g_begin, int64_t stride,
                                                 int64_t row, int column, int accesses) const {
    const T* g_from = g_begin + row * stride + column;
    if (accesses == 0) return {s_to, g_from, 0};
    const T* g_end = g_begin + (args.rows - 1) * stride + args.n;
    const bool last = g_from + accesses * kElems > g_end;
    const bool first = g_from < g_begin && !(last && accesses == 1);
    const int behind = (accesses - 1) * kElems;
    if (last) copy_inside(s_to + behind, g_from + behind, g_begin, g_end);
    if (first) copy_inside(s_to, g_from, g_begin, g_end);
    return {s_to + first * kElems, g_from + first * kElems,
            (accesses - last - first) * kVectorBytes};
  }

  static __device__ __forceinline__ void copy_inside(T* s_to, const T* g_from, const T* g_begin,
                                                     const T* g_end) {
#pragma unroll 1
    for (int j = 0; j < kElems; ++j) {
      if (g_from + j >= g_begin && g_from + j < g_end) s_to[j] = g_from[j];
    }
  }

  static __device__ __forceinline__ int group() { return threadIdx.x / Config::kThreads; }

  // Returns the index of the warp's first access in a chunk. The accesses of a warp are contiguous,
  // so that warps behind the end of a row have no work.
  static __device__ __forceinline__ int first_access() {
    return threadIdx.x % Config::kThreads / kWarp * kWarp * Config::kAccesses;
  }
  static __device__ __forceinline__ int access_of(int i) {
    return first_access() + i * kWarp + threadIdx.x % kWarp;
  }

  // Releases a slot that this warp has read.
  __device__ __forceinline__ void release(int slot) const {
    __syncwarp();
    if (threadIdx.x % kWarp == 0) mbarrier_arrive(&s.s_empty[slot]);
  }

  // Calls body(row) for each row of this thread's group.
  template <typename Body>
  __device__ __forceinline__ void for_each_row(const Body& body) const {
    for (int iteration = group();; iteration += Config::kGroups) {
      const Claim claim = wait_for_claim(iteration);
      if (claim.row >= args.rows) return;
      const Slice p = slice(claim.row);
      T* g_row = args.g_y + claim.row * args.n;
      if constexpr (Mask::kMasked) {
        clear_columns<Config>(g_row, 0, p.begin, rank);
        clear_columns<Config>(g_row, p.end, args.n, rank);
      }
      body(Row{claim.row, p, claim.state, g_row + p.column, iteration / Config::kGroups});
    }
  }

  // The number of chunks that the producer copies twice, because the row is longer than the ring.
  static __device__ __forceinline__ int recopied_chunks(const Slice& p) {
    return max(0, p.chunks - Config::kSlots);
  }

  // Calls body(full, slot, done) for every chunk of a row when the chunk arrives. `done` is the
  // number of accesses before the chunk. `full` is true if the chunk is complete and all its
  // columns are live.
  template <typename Body>
  __device__ __forceinline__ void for_each_chunk(const Row& row, const Body& body) const {
    const int recopied = recopied_chunks(row.slice);
    State state = row.state;
    for (int i = 0; i < row.slice.chunks; ++i, state.advance()) {
      wait_for(state);
      call(body, row.slice, state.slot(), i * kChunk);
      if (i < recopied) release(state.slot());
    }
  }

  // Calls body for every chunk a second time. body must release the slots.
  template <typename Body>
  __device__ __forceinline__ void for_each_chunk_again(const Row& row, const Body& body) const {
    const int recopied = recopied_chunks(row.slice), chunks = row.slice.chunks;
    State state = row.state;
    for (int i = 0; i < recopied; ++i) state.advance();
    for (int i = recopied; i < chunks + recopied; ++i, state.advance()) {
      if (i >= chunks) wait_for(state);
      call(body, row.slice, state.slot(), (i < chunks ? i : i - chunks) * kChunk);
    }
  }

  // NOTE: the slot may still belong to an earlier chunk, which another group has not released. The
  // parity repeats after two phases, so a wait for s_full alone could return too early. Therefore
  // the thread first waits until the other group has released the earlier chunk.
  __device__ __forceinline__ void wait_for(const State& state) const {
    mbarrier_wait(&s.s_empty[state.slot()], state.parity() ^ 1);
    mbarrier_wait(&s.s_full[state.slot()], state.parity());
  }

  template <typename Body>
  static __device__ __forceinline__ void call(const Body& body, const Slice& p, int slot,
                                              int done) {
    if (p.full(done)) {
      body(std::true_type(), slot, done);
    } else {
      body(std::false_type(), slot, done);
    }
  }

  // Loads this thread's accesses of a chunk. Accesses behind the end of the slice become 0.
  template <bool kFull>
  __device__ __forceinline__ void load(uint4 (&r_to)[Config::kAccesses], int input, int slot,
                                       const Slice& p, int done) const {
#pragma unroll
    for (int i = 0; i < Config::kAccesses; ++i) {
      const int access = access_of(i);
      const bool valid = kFull || done + access < p.accesses;
      r_to[i] = valid ? load_words(s.s_slots[slot][input] + access * kElems) : uint4{};
    }
  }

  // Converts access i to fp32. If there is a mask, also multiplies by `factor`. Masked columns
  // become `hidden`.
  template <bool kFull>
  __device__ __forceinline__ void convert(float* r_to, const uint4& from, const Slice& p, int done,
                                          int i, float factor, float hidden) const {
    to_floats<T>(r_to, from);
    if constexpr (Mask::kMasked) {
#pragma unroll
      for (int j = 0; j < kElems; ++j) r_to[j] *= factor;
    }
    const int access = done + access_of(i);
    const bool valid = kFull || access < p.accesses;
    if (kFull || (valid && p.is_live(access))) return;
    const int column = p.column + access * kElems;
#pragma unroll
    for (int j = 0; j < kElems; ++j) {
      if (!valid || !p.sees(column + j)) r_to[j] = hidden;
    }
  }

  // Loads this thread's accesses of a chunk of the first input and converts them as convert() does,
  // with `factor`. Masked columns become -inf. Returns the largest of the values.
  template <bool kFull>
  __device__ __forceinline__ float load_scores(float (&r_x)[kCount], int slot, const Slice& p,
                                               int done, float factor) const {
    uint4 r_in[Config::kAccesses];
    load<kFull>(r_in, 0, slot, p, done);
#pragma unroll
    for (int i = 0; i < Config::kAccesses; ++i) {
      convert<kFull>(r_x + i * kElems, r_in[i], p, done, i, factor, -INFINITY);
    }
    if constexpr (kFull && !Mask::kMasked) return largest<T>(r_in);
    return largest(r_x);
  }

  // Stores the live columns of this thread's access i.
  template <bool kFull>
  __device__ __forceinline__ void store(const Row& row, int done, int i, const float* r_y) const {
    const Slice& p = row.slice;
    const int access = done + access_of(i);
    if (!kFull && access >= p.accesses) return;
    T* g_to = row.g_to + access * kElems;
    if (kFull || p.is_live(access)) {
      store_floats<T>(g_to, r_y);
    } else {
      const int column = p.column + access * kElems;
#pragma unroll
      for (int j = 0; j < kElems; ++j) {
        if (p.sees(column + j)) g_to[j] = from_float<T>(r_y[j]);
      }
    }
  }
};

// Runs a block of a ring kernel. One thread of the last warp is the producer. The groups of the
// other warps compute.
template <typename Job>
__device__ __forceinline__ void run_ring(const Job& job, unsigned* g_claims) {
  using Config = typename Job::Config;
  const bool is_producer = threadIdx.x == Config::kComputing;
  if (is_producer) job.init();
  __syncthreads();
  if constexpr (Config::kCluster > 1) {
    cluster_arrive();
    cluster_wait();
  }
  if (threadIdx.x >= Config::kComputing) {
    if (is_producer) job.copy(g_claims);
    __syncwarp();
  } else {
    job.compute();
  }
  // Wait for the cluster, because a block must not exit while other blocks may send to its shared
  // memory.
  if constexpr (Config::kCluster > 1) {
    cluster_arrive();
    cluster_wait();
  }
}
#endif

}  // namespace torchweld
