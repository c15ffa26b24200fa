// The gradient of row softmax for long rows, one read of every row, which stays in shared memory.
//
// The blocks stay on their SMs and take row after row; a cluster shares one. A warp of every block
// copies its part of the live columns into a ring of pieces, as far ahead as the ring has room. The
// other threads sum the pieces' products as they arrive, join the sums over block and cluster, then
// read the pieces again, store the result, and give them back. So the next row loads while this one
// is reduced, exchanged and stored. A row may start anywhere: what is left of and right of its
// whole 16-byte accesses is at most one element a thread.
#pragma once

#include "ops/softmax/softmax_ring_parts.cuh"

namespace torchweld {

// The live columns of a row as one block of a cluster sees them.
template <int kElems, int kCluster>
struct RingBackwardPart {
  int64_t first;  // the column where this block's whole accesses begin
  int accesses;   // how many it has
  int64_t begin, end;
  int head, tail;  // elements before and after all whole accesses; rank 0 does them

  // `phase` is the distance of column 0 from a 16-byte boundary, in elements.
  TW_HOST_DEVICE RingBackwardPart(const LiveRange& live, int phase, int rank)
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
struct RingBackwardShared {
  using T = typename Config::T;
  alignas(128) T s_pieces[Config::kSlots][2][Config::kPieceBytes / sizeof(T)];
  RingExchange<Config::kThreads, Config::kCluster> s_exchange;
  uint64_t s_full[Config::kSlots], s_empty[Config::kSlots];
};

#if TW_HAS_CLUSTERS
template <typename Config, typename Mask>
struct RingBackwardJob {
  using T = typename Config::T;
  static constexpr int kElems = Config::kElems;
  static constexpr int kPieceAccesses = Config::kPieceAccesses;
  using Part = RingBackwardPart<kElems, Config::kCluster>;
  using Place = RingPlace<Config::kSlots>;
  using Accesses = uint4[Config::kAccesses];
  static constexpr int kCount = Config::kAccesses * kElems;  // a thread's values of a piece

  const RowArgs<T>& args;
  const Mask& mask;
  RingBackwardShared<Config>& s;
  int rank;

  __device__ __forceinline__ RingBackwardJob(const RowArgs<T>& args, const Mask& mask,
                                             RingBackwardShared<Config>& s)
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
    init_slots<Config>(s);
    s.s_exchange.init();
    barrier_init_fence();
  }

  // One thread's: the pieces of all rows, each as soon as its slot is free.
  __device__ __forceinline__ void copy() const {
    Place place;
    for (int64_t row = first_row(); row < args.rows; row += row_step()) {
      const Part p = part(row, live(row));
      const T* g_x = args.g_x + row * args.x_row_stride + p.first;
      const T* g_dy = args.g_dy + row * args.dy_row_stride + p.first;
      for (int done = 0; done < p.accesses; done += kPieceAccesses, place.advance()) {
        const uint32_t bytes = min(kPieceAccesses, p.accesses - done) * kVectorBytes;
        barrier_wait(&s.s_empty[place.slot], place.parity ^ 1);
        uint64_t* s_full = &s.s_full[place.slot];
        barrier_expect(s_full, bytes * 2);
        bulk_load(s.s_pieces[place.slot][0], g_x + done * kElems, bytes, s_full);
        bulk_load(s.s_pieces[place.slot][1], g_dy + done * kElems, bytes, s_full);
      }
    }
  }

  // This thread's accesses of a piece, zeros behind the last one.
  template <int kInput>
  __device__ __forceinline__ void load(Accesses& r_to, int slot, int accesses) const {
    const T* s_piece = s.s_pieces[slot][kInput];
#pragma unroll
    for (int i = 0; i < Config::kAccesses; ++i) {
      const int at = i * Config::kThreads + threadIdx.x;
      r_to[i] = at < accesses ? load_words(s_piece + at * kElems) : uint4{};
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

  __device__ __forceinline__ void clear_hidden_columns(T* g_row, const Part& p) const {
    if constexpr (Mask::kMasked) {
      clear_columns<Config>(g_row, 0, p.begin, rank);
      clear_columns<Config>(g_row, p.end, args.n, rank);
    }
  }

  __device__ __forceinline__ void compute() const {
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
        load<0>(r_in_y, place.slot, p.accesses - done);
        load<1>(r_in_dy, place.slot, p.accesses - done);
        widen(r_y, r_in_y);
        widen(r_dy, r_in_dy);
#pragma unroll
        for (int j = 0; j < kCount; ++j) dot += r_y[j] * r_dy[j];
      }
      if (edge >= 0) dot += edge_y * edge_dy;
      dot = s.s_exchange.sum(dot, turn);

      for (int done = 0; done < p.accesses; done += kPieceAccesses, again.advance()) {
        load<0>(r_in_y, again.slot, p.accesses - done);
        load<1>(r_in_dy, again.slot, p.accesses - done);
        give_back_slot(s, again.slot);
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
__global__ __launch_bounds__(Config::kBlockThreads, 1) void softmax_ring_backward_kernel(
    const RowArgs<typename Config::T> args, const Mask mask) {
#if TW_HAS_CLUSTERS
  extern __shared__ __align__(128) unsigned char s_memory[];
  auto& s = *reinterpret_cast<RingBackwardShared<Config>*>(s_memory);
  const RingBackwardJob<Config, Mask> job(args, mask, s);
  run_ring<Config>(job, [&] { job.copy(); });
#endif
}

}  // namespace torchweld
