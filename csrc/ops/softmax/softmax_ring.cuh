// Row softmax and its gradient for long rows, one read of every row, which stays in shared memory.
//
// The blocks stay on their SMs and take row after row; a cluster shares one. A warp of every block
// copies its part of the live columns into a ring of pieces, as far ahead as the ring has room. The
// other threads reduce the pieces as they arrive, join (max, sum) over block and cluster, then read
// the pieces again, store the result, and give them back. So the next row loads while this one is
// reduced, exchanged and stored. A row may start anywhere: what is left of and right of its whole
// 16-byte accesses is at most one element a thread.
// Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018 (the merge).
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
  static constexpr int kThreads = kShape.threads;  // without the copying warp
  static constexpr int kBlockThreads = kShape.block_threads();
  static constexpr int kBlocksPerSm = kShape.blocks_per_sm;
  static constexpr int kCluster = kShape.cluster;
  static constexpr int kAccesses = kShape.accesses(kBackward);
  static constexpr int kSlots = kShape.slots();
  static constexpr int kInputs = kBackward ? 2 : 1;
  static constexpr int kPieceBytes = kShape.piece_bytes(kBackward);
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

// The live columns of a row as one block of a cluster sees them.
template <int kElems, int kCluster>
struct RingPart {
  int64_t first;  // the column where this block's whole accesses begin
  int accesses;   // how many it has
  int64_t begin, end;
  int head, tail;  // elements before and after all whole accesses; rank 0 does them

  // `phase` is the distance of column 0 from a 16-byte boundary, in elements.
  TW_HOST_DEVICE RingPart(const LiveRange& live, int phase, int rank)
      : begin(live.empty() ? 0 : live.begin), end(live.empty() ? 0 : live.end) {
    const int to_boundary = static_cast<int>((kElems - (begin + phase) % kElems) % kElems);
    const int64_t length = end - begin;
    head = to_boundary < length ? to_boundary : static_cast<int>(length);
    const int total = static_cast<int>((length - head) / kElems);
    tail = static_cast<int>(length - head - static_cast<int64_t>(total) * kElems);
    // Shares are whole lines of 128 bytes.
    const int share = (total + 8 * kCluster - 1) / (8 * kCluster) * 8;
    const int left = total - rank * share;
    accesses = left < 0 ? 0 : (left < share ? left : share);
    first = begin + head + static_cast<int64_t>(rank) * share * kElems;
  }

  // The column outside of the whole accesses that a thread of rank 0 does, or -1.
  TW_HOST_DEVICE int64_t edge(int thread) const {
    if (thread < head) return begin + thread;
    return thread >= kElems && thread - kElems < tail ? end - tail + thread - kElems : -1;
  }
};

template <typename Config>
struct RingShared {
  using T = typename Config::T;
  alignas(128) T s_pieces[Config::kSlots][Config::kInputs][Config::kPieceBytes / sizeof(T)];
  BlockExchange<Config::kThreads, /*kWholeBlock=*/false> s_exchange[2];
  float2 s_parts[2][Config::kCluster];  // from every block of the cluster
  uint64_t s_arrived[2];
  uint64_t s_full[Config::kSlots], s_empty[Config::kSlots];
};

#if TW_HAS_CLUSTERS
template <typename Config, typename Mask>
struct RingJob {
  using T = typename Config::T;
  static constexpr int kElems = Config::kElems;
  static constexpr int kPieceAccesses = Config::kPieceBytes / kVectorBytes;
  using Part = RingPart<kElems, Config::kCluster>;
  using Place = RingPlace<Config::kSlots>;
  using Accesses = uint4[Config::kAccesses];
  static constexpr int kCount = Config::kAccesses * kElems;  // a thread's values of a piece

  const RowArgs<T>& args;
  const Mask& mask;
  RingShared<Config>& s;
  int rank;

  __device__ __forceinline__ RingJob(const RowArgs<T>& args, const Mask& mask,
                                     RingShared<Config>& s)
      : args(args), mask(mask), s(s), rank(blockIdx.x % Config::kCluster) {}

  static __device__ __forceinline__ int64_t first_row() { return blockIdx.x / Config::kCluster; }
  static __device__ __forceinline__ int64_t row_step() { return gridDim.x / Config::kCluster; }

  __device__ __forceinline__ LiveRange live(int64_t row) const {
    return row < args.rows ? mask.live(args.first_row + row) : LiveRange{0, 0};
  }
  __device__ __forceinline__ Part part(int64_t row, const LiveRange& live) const {
    const auto at = reinterpret_cast<uintptr_t>(args.g_y + row * args.n);
    return Part(live, static_cast<int>(at % kVectorBytes / sizeof(T)), rank);
  }

  __device__ __forceinline__ void init() const {
    for (int i = 0; i < Config::kSlots; ++i) {
      barrier_init(&s.s_full[i], 1);
      barrier_init(&s.s_empty[i], Config::kThreads / kWarp);
    }
    for (int i = 0; i < 2; ++i) barrier_init(&s.s_arrived[i], 1);
    barrier_init_fence();
  }

  // One thread's: the pieces of all rows, each as soon as its slot is free.
  __device__ __forceinline__ void copy() const {
    Place place;
    for (int64_t row = first_row(); row < args.rows; row += row_step()) {
      const Part p = part(row, live(row));
      const T* g_x = args.g_x + row * args.x_row_stride + p.first;
      const T* g_dy = Config::kBackward ? args.g_dy + row * args.dy_row_stride + p.first : nullptr;
      for (int done = 0; done < p.accesses; done += kPieceAccesses, place.advance()) {
        const uint32_t bytes = min(kPieceAccesses, p.accesses - done) * kVectorBytes;
        barrier_wait(&s.s_empty[place.slot], place.parity ^ 1);
        uint64_t* s_full = &s.s_full[place.slot];
        barrier_expect(s_full, bytes * Config::kInputs);
        bulk_load(s.s_pieces[place.slot][0], g_x + done * kElems, bytes, s_full);
        if constexpr (Config::kBackward) {
          bulk_load(s.s_pieces[place.slot][1], g_dy + done * kElems, bytes, s_full);
        }
      }
    }
  }

  // This thread's accesses of a piece, `hidden` behind the last one.
  template <int kInput = 0>
  __device__ __forceinline__ void load(Accesses& r_to, int slot, int accesses, float hidden) const {
    const T* s_piece = s.s_pieces[slot][kInput];
#pragma unroll
    for (int i = 0; i < Config::kAccesses; ++i) {
      const int at = i * Config::kThreads + threadIdx.x;
      r_to[i] = at < accesses ? load_words(s_piece + at * kElems) : fill_words<T>(hidden);
    }
  }

  static __device__ __forceinline__ void widen(float (&r_to)[kCount], const Accesses& from) {
#pragma unroll
    for (int i = 0; i < Config::kAccesses; ++i) to_floats<T>(r_to + i * kElems, from[i]);
  }

  __device__ __forceinline__ void store(T* g_to, const float (&r_y)[kCount], int accesses) const {
#pragma unroll
    for (int i = 0; i < Config::kAccesses; ++i) {
      const int at = i * Config::kThreads + threadIdx.x;
      if (at < accesses) store_floats(g_to + at * kElems, r_y + i * kElems);
    }
  }

  // The warp has read the piece.
  __device__ __forceinline__ void give_back(int slot) const {
    __syncwarp();
    if (threadIdx.x % kWarp == 0) barrier_arrive(&s.s_empty[slot]);
  }

  // Every block's value, in the order of the ranks. `turn` counts the calls.
  __device__ __forceinline__ void gather(float2 (&parts)[Config::kCluster], float2 mine,
                                         int turn) const {
    const int i = turn % 2;
    uint64_t* s_arrived = &s.s_arrived[i];
    // NOTE: a block sends its value of the next turn but one only when it has everyone's of the
    // next turn, which they send after reading this turn's; two places are enough.
    if (threadIdx.x == 0) barrier_expect(s_arrived, sizeof(float2) * Config::kCluster);
    if (threadIdx.x < Config::kCluster) {
      send_to_block(&s.s_parts[i][rank], mine, s_arrived, threadIdx.x);
    }
    barrier_wait(s_arrived, turn / 2 % 2);
#pragma unroll
    for (int b = 0; b < Config::kCluster; ++b) parts[b] = s.s_parts[i][b];
  }

  __device__ __forceinline__ MaxSum merge(MaxSum x, const Exponent<T>& exponent, int turn) const {
    x = s.s_exchange[turn % 2].merge_warps(warp_merge(x, exponent), exponent);
    if constexpr (Config::kCluster == 1) return x;
    float2 parts[Config::kCluster];
    gather(parts, make_float2(x.max, x.sum), turn);
    float max = parts[0].x;
#pragma unroll
    for (int b = 1; b < Config::kCluster; ++b) max = fmaxf(max, parts[b].x);
    float sum = 0.f;
#pragma unroll
    for (int b = 0; b < Config::kCluster; ++b) {
      sum += rescaled_sum({parts[b].x, parts[b].y}, max, exponent);
    }
    return {max, sum};
  }

  __device__ __forceinline__ float sum(float x, int turn) const {
    x = s.s_exchange[turn % 2].sum_warps(warp_sum(x));
    if constexpr (Config::kCluster == 1) return x;
    float2 parts[Config::kCluster];
    gather(parts, make_float2(x, 0.f), turn);
    float sum = 0.f;
#pragma unroll
    for (int b = 0; b < Config::kCluster; ++b) sum += parts[b].x;
    return sum;
  }

  // Zeros in the columns [from, to) of a row, by all threads of the cluster.
  __device__ __forceinline__ void clear(T* g_row, int64_t from, int64_t to) const {
    const int me = rank * Config::kThreads + threadIdx.x;
    constexpr int kAll = Config::kCluster * Config::kThreads;
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

  __device__ __forceinline__ void clear_hidden_columns(T* g_row, const Part& p) const {
    if constexpr (Mask::kMasked) {
      clear(g_row, 0, p.begin);
      clear(g_row, p.end, args.n);
    }
  }

  __device__ __forceinline__ void forward() const {
    const Exponent<T> exponent(mask.scale());
    const float sign = Mask::kMasked ? exponent.sign : 1.f;
    Place place;
    LiveRange range = live(first_row());
    int turn = 0;
    for (int64_t row = first_row(); row < args.rows; row += row_step(), ++turn) {
      const Part p = part(row, range);
      range = live(row + row_step());  // the padding is fetched a row ahead
      const T* g_x = args.g_x + row * args.x_row_stride;
      T* g_y = args.g_y + row * args.n;
      const int64_t edge = rank == 0 ? p.edge(threadIdx.x) : -1;
      float r_edge[1];
      if (edge >= 0) r_edge[0] = to_float(g_x[edge]) * sign;
      clear_hidden_columns(g_y, p);

      // Reduce the pieces as they arrive.
      Accesses r_in;
      float r_x[kCount];
      MaxSum mine = {-INFINITY, 0.f};
      Place again = place;
      for (int done = 0; done < p.accesses; done += kPieceAccesses, place.advance()) {
        barrier_wait(&s.s_full[place.slot], place.parity);
        load(r_in, place.slot, p.accesses - done, -sign * INFINITY);  // smaller than any score
        widen(r_x, r_in);
        if constexpr (Mask::kMasked) {
#pragma unroll
          for (float& x : r_x) x *= sign;
          accumulate(mine, largest(r_x), r_x, exponent);
        } else {
          accumulate(mine, largest<T>(r_in), r_x, exponent);
        }
      }
      if (edge >= 0) accumulate(mine, largest(r_edge), r_edge, exponent);
      const MaxSum total = merge(mine, exponent, turn);
      const float factor = 1.f / total.sum;

      // Read them again, store the result.
      for (int done = 0; done < p.accesses; done += kPieceAccesses, again.advance()) {
        load(r_in, again.slot, p.accesses - done, 0.f);
        give_back(again.slot);
        widen(r_x, r_in);
#pragma unroll
        for (float& x : r_x) x = exponent(x * sign, total.max) * factor;
        store(g_y + p.first + done * kElems, r_x, p.accesses - done);
      }
      if (edge >= 0) g_y[edge] = from_float<T>(exponent(r_edge[0], total.max) * factor);
    }
  }

  __device__ __forceinline__ void backward() const {
    const float scale = mask.scale();
    Place place;
    LiveRange range = live(first_row());
    int turn = 0;
    for (int64_t row = first_row(); row < args.rows; row += row_step(), ++turn) {
      const Part p = part(row, range);
      range = live(row + row_step());
      T* g_dx = args.g_y + row * args.n;
      const int64_t edge = rank == 0 ? p.edge(threadIdx.x) : -1;
      float edge_y = 0.f, edge_dy = 0.f;
      if (edge >= 0) {
        edge_y = to_float(args.g_x[row * args.x_row_stride + edge]);
        edge_dy = to_float(args.g_dy[row * args.dy_row_stride + edge]);
      }
      clear_hidden_columns(g_dx, p);

      Accesses r_in_y, r_in_dy;
      float r_y[kCount], r_dy[kCount];
      float dot = 0.f;
      Place again = place;
      for (int done = 0; done < p.accesses; done += kPieceAccesses, place.advance()) {
        barrier_wait(&s.s_full[place.slot], place.parity);
        load<0>(r_in_y, place.slot, p.accesses - done, 0.f);
        load<1>(r_in_dy, place.slot, p.accesses - done, 0.f);
        widen(r_y, r_in_y);
        widen(r_dy, r_in_dy);
#pragma unroll
        for (int j = 0; j < kCount; ++j) dot += r_y[j] * r_dy[j];
      }
      if (edge >= 0) dot += edge_y * edge_dy;
      dot = sum(dot, turn);

      for (int done = 0; done < p.accesses; done += kPieceAccesses, again.advance()) {
        load<0>(r_in_y, again.slot, p.accesses - done, 0.f);
        load<1>(r_in_dy, again.slot, p.accesses - done, 0.f);
        give_back(again.slot);
        widen(r_y, r_in_y);
        widen(r_dy, r_in_dy);
#pragma unroll
        for (int j = 0; j < kCount; ++j) r_y[j] = gradient(r_y[j], r_dy[j], dot, scale);
        store(g_dx + p.first + done * kElems, r_y, p.accesses - done);
      }
      if (edge >= 0) g_dx[edge] = from_float<T>(gradient(edge_y, edge_dy, dot, scale));
    }
  }

  static __device__ __forceinline__ float gradient(float y, float dy, float dot, float scale) {
    const float dx = y * (dy - dot);
    return Mask::kMasked ? dx * scale : dx;
  }
};
#endif

template <typename Config, typename Mask>
__global__ __launch_bounds__(Config::kBlockThreads, Config::kBlocksPerSm) void softmax_ring_kernel(
    const RowArgs<typename Config::T> args, const Mask mask) {
#if TW_HAS_CLUSTERS
  extern __shared__ __align__(128) unsigned char s_memory[];
  auto& s = *reinterpret_cast<RingShared<Config>*>(s_memory);
  const RingJob<Config, Mask> job(args, mask, s);
  if (threadIdx.x == 0) job.init();
  __syncthreads();
  if constexpr (Config::kCluster > 1) {
    cluster_arrive();
    cluster_wait();
  }
  if (threadIdx.x >= Config::kThreads) {
    if (threadIdx.x == Config::kThreads) job.copy();
    __syncwarp();
  } else if constexpr (Config::kBackward) {
    job.backward();
  } else {
    job.forward();
  }
  // A block's shared memory outlives what its neighbours send there.
  if constexpr (Config::kCluster > 1) {
    cluster_arrive();
    cluster_wait();
  }
#endif
}

}  // namespace torchweld
