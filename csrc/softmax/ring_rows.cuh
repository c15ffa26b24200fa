// How the rings of softmax and of its gradient take their rows.
//
// The blocks are persistent. A cluster of them shares a row and claims the next one from a counter,
// as soon as its ring has room for it: with rows dealt out beforehand the slowest cluster cost 6 %.
// The producer, a warp of every block, copies the live columns, as far ahead as there is room, into
// a ring of pieces. The consumers are groups of warps that take the rows by turns: a group reduces
// the pieces as they arrive, joins what it found over its warps and the cluster, then reads the
// pieces again, stores the result, and gives them back. So one group reduces while another one
// waits for the cluster or stores, and rows load meanwhile: softmax (2048, 65536) bfloat16. Of a
// row that is longer than the ring the first pieces are given back at once, and copied again behind
// the last one; nothing waits in a circle, because a slot is always filled after the one before it.
// A row may start anywhere: it is copied in whole 16-byte accesses, whose elements beside the row
// count for nothing.
#pragma once

#include "device/features.cuh"
#include "softmax/ring_parts.cuh"

namespace torchweld {

// NOTE: a turn's place is used again when all earlier turns but kSlots have been finished, as every
// row has a piece, and read by the groups of every block.
template <int kSlots, int kGroups>
constexpr int kRingClaims = (kSlots + kGroups + 15) / 16 * 16;

template <typename Config>
struct RingShared {
  using T = typename Config::T;
  static constexpr int kClaims = kRingClaims<Config::kSlots, Config::kGroups>;
  alignas(128) T s_pieces[Config::kSlots][Config::kInputs][Config::kPieceBytes / sizeof(T)];
  RingExchange<Config::kThreads, Config::kGroups, Config::kCluster> s_exchange[Config::kGroups];
  uint64_t s_full[Config::kSlots], s_empty[Config::kSlots];
  float2 s_claims[kClaims];
  uint64_t s_claimed[kClaims];
};

#if TW_HAS_CLUSTERS
// A row of a group: its part of this block, and where that lies.
template <typename Part, typename Place, typename T>
struct RingRow {
  Part part;
  Place place;
  T* g_to;   // the column of the part's first access
  int turn;  // of the group
};

template <typename Config_, typename Mask_>
struct RingRows {
  using Config = Config_;
  using Mask = Mask_;
  using T = typename Config::T;
  using Shared = RingShared<Config>;
  static constexpr int kElems = Config::kElems;
  static constexpr int kPiece = Config::kPieceAccesses;
  static constexpr int kCount = Config::kAccesses * kElems;  // a thread's values of a piece
  static constexpr int kClaims = Shared::kClaims;
  using Part = RingPart<kElems, Config::kCluster, kPiece>;
  using Place = RingPlace<Config::kSlots>;
  using Claim = RingClaim<Place>;
  using Row = RingRow<Part, Place, T>;

  const RowArgs<T>& args;
  const Mask& mask;
  Shared& s;
  int rank;

  __device__ __forceinline__ RingRows(const RowArgs<T>& args, const Mask& mask, Shared& s)
      : args(args), mask(mask), s(s), rank(blockIdx.x % Config::kCluster) {}

  __device__ __forceinline__ Part part(int64_t row) const {
    const auto at = reinterpret_cast<uintptr_t>(args.g_y + row * args.n);
    // args.first_row is 0: a ring takes all rows at once.
    return Part(mask.live_columns(row), static_cast<int>(at % kVectorBytes / sizeof(T)), rank);
  }

  // A slot is full when its copies have arrived, and empty when a group's warps have given it back.
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < Config::kSlots; ++i) {
      mbarrier_init(&s.s_full[i], 1);
      mbarrier_init(&s.s_empty[i], Config::kThreads / kWarp);
    }
    for (int i = 0; i < Config::kGroups; ++i) s.s_exchange[i].init();
    for (int i = 0; i < kClaims; ++i) mbarrier_init(&s.s_claimed[i], 1);
    // The first row is the cluster's without a claim.
    s.s_claims[0] = Claim::told(blockIdx.x / Config::kCluster, Place());
    mbarrier_arrive(&s.s_claimed[0]);
    mbarrier_init_fence();
  }

  __device__ __forceinline__ Claim claim(int turn) const {
    mbarrier_wait(&s.s_claimed[turn % kClaims], turn / kClaims % 2);
    return Claim(s.s_claims[turn % kClaims]);
  }

  // By the copying threads of a cluster: rank 0 tells every block.
  __device__ __forceinline__ void tell(int turn, uint32_t row, const Place& place) const {
    const int i = turn % kClaims;
    const float2 told = Claim::told(row, place);
    if constexpr (Config::kCluster == 1) {
      s.s_claims[i] = told;
      mbarrier_arrive(&s.s_claimed[i]);
    } else {
      mbarrier_arrive_expect_tx(&s.s_claimed[i], sizeof(float2));
      if (rank != 0) return;
      for (int b = 0; b < Config::kCluster; ++b) {
        send_to_block(&s.s_claims[i], told, &s.s_claimed[i], b);
      }
    }
  }

  // The row after those that the clusters begin with, by rank 0.
  // NOTE: the counter is 0 again after as many claims as there are rows: one for each row but the
  // first of each cluster, and one in vain for each cluster.
  __device__ __forceinline__ uint32_t claim_next(unsigned* g_claims) const {
    if (rank != 0) return 0;
    return gridDim.x / Config::kCluster + atomicInc(g_claims, static_cast<uint32_t>(args.rows - 1));
  }

  // By one thread: the pieces of all rows, each as soon as its slot is free.
  __device__ __forceinline__ void copy(unsigned* g_claims) const {
    Place place;
    for (int turn = 0;; ++turn) {
      const int64_t row = claim(turn).row;
      if (row >= args.rows) {
        // The other groups wait for rows, too.
        for (int g = 1; g < Config::kGroups; ++g) {
          tell(turn + g, static_cast<uint32_t>(args.rows), place);
        }
        return;
      }
      const uint32_t next = claim_next(g_claims);
      const Part p = part(row);
      for (int i = 0; i < p.pieces + copied_again(p); ++i, place.advance()) {
        const int done = (i < p.pieces ? i : i - p.pieces) * kPiece;
        mbarrier_wait(&s.s_empty[place.slot()], place.parity() ^ 1);
        copy_piece(place.slot(), row, p.column + done * kElems,
                   max(0, min(kPiece, p.accesses - done)));
      }
      tell(turn + 1, next, place);
    }
  }

  __device__ __forceinline__ void copy_piece(int slot, int64_t row, int column,
                                             int accesses) const {
    Whole whole[Config::kInputs];
    uint32_t bytes = 0;
    bool edges = false;
#pragma unroll
    for (int k = 0; k < Config::kInputs; ++k) {
      whole[k] = copy_edges(s.s_pieces[slot][k], k == 0 ? args.g_x : args.g_dy,
                            k == 0 ? args.x_row_stride : args.dy_row_stride, row, column, accesses);
      bytes += whole[k].bytes;
      edges |= whole[k].bytes != accesses * kVectorBytes;
    }
    if (edges) async_fence();  // the slot's next piece comes by a bulk copy
    mbarrier_arrive_expect_tx(&s.s_full[slot], bytes);
#pragma unroll
    for (int k = 0; k < Config::kInputs; ++k) {
      const Whole& w = whole[k];
      if (w.bytes > 0) bulk_load(w.s_to, w.g_from, w.bytes, &s.s_full[slot]);
    }
  }

  // What of a piece a bulk copy may bring.
  struct Whole {
    T* s_to;
    const T* g_from;
    int bytes;
  };

  // Copies the accesses that reach outside of the tensor, of which nothing else may be read.
  __device__ __forceinline__ Whole copy_edges(T* s_to, const T* g_begin, int64_t stride,
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

  // A warp's accesses of a piece are neighbours: where a row ends, the warps behind have none.
  static __device__ __forceinline__ int first_access() {
    return threadIdx.x % Config::kThreads / kWarp * kWarp * Config::kAccesses;
  }
  static __device__ __forceinline__ int place_of(int i) {
    return first_access() + i * kWarp + threadIdx.x % kWarp;
  }

  // The warp has read the piece.
  __device__ __forceinline__ void give_back(int slot) const {
    __syncwarp();
    if (threadIdx.x % kWarp == 0) mbarrier_arrive(&s.s_empty[slot]);
  }

  // Calls body(row) for every row of this thread's group.
  template <typename Body>
  __device__ __forceinline__ void each_row(const Body& body) const {
    for (int turn = group();; turn += Config::kGroups) {
      const Claim claimed = claim(turn);
      if (claimed.row >= args.rows) return;
      const Part p = part(claimed.row);
      T* g_row = args.g_y + claimed.row * args.n;
      if constexpr (Mask::kMasked) {
        clear_columns<Config>(g_row, 0, p.begin, rank);
        clear_columns<Config>(g_row, p.end, args.n, rank);
      }
      body(Row{p, claimed.place, g_row + p.column, turn / Config::kGroups});
    }
  }

  // The first pieces of a row that is longer than the ring.
  static __device__ __forceinline__ int copied_again(const Part& p) {
    return max(0, p.pieces - Config::kSlots);
  }

  // Calls body(full, slot, done) for every piece of a row as it arrives: the one that begins after
  // `done` accesses, `full` where all of it is there and live.
  template <typename Body>
  __device__ __forceinline__ void each_piece(const Row& row, const Body& body) const {
    const int again = copied_again(row.part);
    Place place = row.place;
    for (int i = 0; i < row.part.pieces; ++i, place.advance()) {
      wait_for(place);
      call(body, row.part, place.slot(), i * kPiece);
      if (i < again) give_back(place.slot());
    }
  }

  // The same once more; body gives the slots back.
  template <typename Body>
  __device__ __forceinline__ void each_piece_again(const Row& row, const Body& body) const {
    const int again = copied_again(row.part), pieces = row.part.pieces;
    Place place = row.place;
    for (int i = 0; i < again; ++i) place.advance();
    for (int i = again; i < pieces + again; ++i, place.advance()) {
      if (i >= pieces) wait_for(place);
      call(body, row.part, place.slot(), (i < pieces ? i : i - pieces) * kPiece);
    }
  }

  // NOTE: a parity tells two turns of a slot apart, and another group's piece may still be on its
  // way into this slot: it must have been given back before the wait for the next one.
  __device__ __forceinline__ void wait_for(const Place& place) const {
    mbarrier_wait(&s.s_empty[place.slot()], place.parity() ^ 1);
    mbarrier_wait(&s.s_full[place.slot()], place.parity());
  }

  template <typename Body>
  static __device__ __forceinline__ void call(const Body& body, const Part& p, int slot, int done) {
    if (p.full(done)) {
      body(std::true_type(), slot, done);
    } else {
      body(std::false_type(), slot, done);
    }
  }

  // This thread's accesses of a piece; zeros where there is none.
  template <bool kFull>
  __device__ __forceinline__ void load(uint4 (&r_to)[Config::kAccesses], int input, int slot,
                                       const Part& p, int done) const {
#pragma unroll
    for (int i = 0; i < Config::kAccesses; ++i) {
      const int at = place_of(i);
      const bool there = kFull || done + at < p.accesses;
      r_to[i] = there ? load_words(s.s_pieces[slot][input] + at * kElems) : uint4{};
    }
  }

  // Access i of them in fp32 times `factor`, `hidden` where a column isn't live.
  template <bool kFull>
  __device__ __forceinline__ void widen(float* r_to, const uint4& from, const Part& p, int done,
                                        int i, float factor, float hidden) const {
    to_floats<T>(r_to, from);
    if constexpr (Mask::kMasked) {
#pragma unroll
      for (int j = 0; j < kElems; ++j) r_to[j] *= factor;
    }
    const int at = done + place_of(i);
    const bool there = kFull || at < p.accesses;
    if (kFull || (there && p.whole(at))) return;
    const int column = p.column + at * kElems;
#pragma unroll
    for (int j = 0; j < kElems; ++j) {
      if (!there || !p.sees(column + j)) r_to[j] = hidden;
    }
  }

  // Stores access i of this thread's of a piece, where it is there and live.
  template <bool kFull>
  __device__ __forceinline__ void store(const Row& row, int done, int i, const float* r_y) const {
    const Part& p = row.part;
    const int at = done + place_of(i);
    if (!kFull && at >= p.accesses) return;
    T* g_to = row.g_to + at * kElems;
    if (kFull || p.whole(at)) {
      store_floats<T>(g_to, r_y);
    } else {
      const int column = p.column + at * kElems;
#pragma unroll
      for (int j = 0; j < kElems; ++j) {
        if (p.sees(column + j)) g_to[j] = from_float<T>(r_y[j]);
      }
    }
  }
};

// What every block does: one thread of the last warp copies, the groups compute.
template <typename Job>
__device__ __forceinline__ void run_ring(const Job& job, unsigned* g_claims) {
  using Config = typename Job::Config;
  const bool copies = threadIdx.x == Config::kComputing;
  if (copies) job.init();
  __syncthreads();
  if constexpr (Config::kCluster > 1) {
    cluster_arrive();
    cluster_wait();
  }
  if (threadIdx.x >= Config::kComputing) {
    if (copies) job.copy(g_claims);
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
