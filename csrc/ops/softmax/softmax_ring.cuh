// Row softmax for long rows, one read of every row, which stays in shared memory.
//
// The blocks stay on their SMs; a cluster of them shares a row and claims the next one as soon as
// its ring has room for it. A warp of every block copies the live columns, as far ahead as there is
// room, into a ring of pieces. Groups of warps take the rows by turns: a group reduces the pieces
// as they arrive, joins (max, sum) over its warps and the cluster, then reads the pieces again,
// stores the result, and gives them back. So one group reduces while another one waits for the
// cluster or stores, and rows load meanwhile. A row may start anywhere: it is copied in whole
// 16-byte accesses, whose elements beside the row count as -inf.
// Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018 (the merge).
#pragma once

#include "ops/softmax/softmax_ring_parts.cuh"

namespace torchweld {

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
    return make_float2(__uint_as_float(row), __uint_as_float(place.slot * 2 + place.parity));
  }
  __device__ __forceinline__ explicit RingClaim(float2 told) {
    row = __float_as_uint(told.x);
    const uint32_t where = __float_as_uint(told.y);
    place.slot = static_cast<int>(where / 2);
    place.parity = where % 2;
  }
};

// NOTE: a turn's place is used again when all earlier turns but kSlots have been finished, as every
// row has a piece, and read by the groups of every block.
template <int kSlots, int kGroups>
constexpr int kRingClaims = (kSlots + kGroups + 15) / 16 * 16;

template <typename Config>
struct RingShared {
  using T = typename Config::T;
  static constexpr int kClaims = kRingClaims<Config::kSlots, Config::kGroups>;
  alignas(128) T s_pieces[Config::kSlots][Config::kPieceBytes / sizeof(T)];
  RingExchange<Config::kThreads, Config::kCluster> s_exchange[Config::kGroups];
  uint64_t s_full[Config::kSlots], s_empty[Config::kSlots];
  float2 s_claims[kClaims];
  uint64_t s_claimed[kClaims];
};

#if TW_HAS_CLUSTERS
template <typename Config, typename Mask>
struct RingJob {
  using T = typename Config::T;
  static constexpr int kElems = Config::kElems;
  static constexpr int kPiece = Config::kPieceAccesses;
  static constexpr int kCount = Config::kAccesses * kElems;  // a thread's values of a piece
  static constexpr int kClaims = RingShared<Config>::kClaims;
  using Part = RingPart<kElems, Config::kCluster, kPiece>;
  using Place = RingPlace<Config::kSlots>;
  using Claim = RingClaim<Place>;
  using Accesses = uint4[Config::kAccesses];

  const RowArgs<T>& args;
  const Mask& mask;
  RingShared<Config>& s;
  int rank;

  __device__ __forceinline__ RingJob(const RowArgs<T>& args, const Mask& mask,
                                     RingShared<Config>& s)
      : args(args), mask(mask), s(s), rank(blockIdx.x % Config::kCluster) {}

  __device__ __forceinline__ Part part(int64_t row) const {
    const auto at = reinterpret_cast<uintptr_t>(args.g_y + row * args.n);
    // args.first_row is 0: a ring takes all rows at once.
    return Part(mask.live_columns(row), static_cast<int>(at % kVectorBytes / sizeof(T)), rank);
  }

  __device__ __forceinline__ void init() const {
    init_slots<Config>(s);
    for (int i = 0; i < Config::kGroups; ++i) s.s_exchange[i].init();
    for (int i = 0; i < kClaims; ++i) barrier_init(&s.s_claimed[i], 1);
    // The first row is the cluster's without a claim.
    s.s_claims[0] = Claim::told(blockIdx.x / Config::kCluster, Place());
    barrier_arrive(&s.s_claimed[0]);
    barrier_init_fence();
  }

  __device__ __forceinline__ Claim claim(int turn) const {
    barrier_wait(&s.s_claimed[turn % kClaims], turn / kClaims % 2);
    return Claim(s.s_claims[turn % kClaims]);
  }

  // By the copying thread of rank 0, to every block.
  __device__ __forceinline__ void announce(int turn, uint32_t row, const Place& place) const {
    const int i = turn % kClaims;
    const float2 told = Claim::told(row, place);
    if constexpr (Config::kCluster == 1) {
      s.s_claims[i] = told;
      barrier_arrive(&s.s_claimed[i]);
    } else {
      for (int b = 0; b < Config::kCluster; ++b) {
        send_to_block(&s.s_claims[i], told, &s.s_claimed[i], b);
      }
    }
  }
  __device__ __forceinline__ void expect_claim(int turn) const {
    if (Config::kCluster > 1) barrier_expect(&s.s_claimed[turn % kClaims], sizeof(float2));
  }

  // One thread's: the pieces of all rows, each as soon as its slot is free.
  __device__ __forceinline__ void copy(unsigned* g_claims) const {
    const uint32_t clusters = gridDim.x / Config::kCluster;
    Place place;
    for (int turn = 0;; ++turn) {
      const int64_t row = claim(turn).row;
      if (row >= args.rows) {
        // The other groups wait for rows, too.
        for (int g = 1; g < Config::kGroups; ++g) {
          expect_claim(turn + g);
          if (rank == 0) announce(turn + g, static_cast<uint32_t>(args.rows), place);
        }
        return;
      }
      // NOTE: the counter is 0 again after as many claims as there are rows: one for each row but
      // the first of each cluster, and one in vain for each cluster.
      uint32_t claimed = 0;
      if (rank == 0) claimed = atomicInc(g_claims, static_cast<uint32_t>(args.rows - 1));
      const Part p = part(row);
      const T* g_x = args.g_x + row * args.x_row_stride + p.column;
      for (int i = 0; i < p.pieces; ++i, place.advance()) {
        const int done = i * kPiece;
        barrier_wait(&s.s_empty[place.slot], place.parity ^ 1);
        copy_piece(place.slot, g_x + done * kElems, max(0, min(kPiece, p.accesses - done)));
      }
      expect_claim(turn + 1);
      if (rank == 0) announce(turn + 1, clusters + claimed, place);
    }
  }

  __device__ __forceinline__ void copy_piece(int slot, const T* g_from, int accesses) const {
    T* s_to = s.s_pieces[slot];
    if (accesses > 0) {
      // Nothing may be read outside of the tensor.
      const T* g_end = args.g_x + (args.rows - 1) * args.x_row_stride + args.n;
      const bool last = g_from + accesses * kElems > g_end;
      const bool first = g_from < args.g_x && !(last && accesses == 1);
      const int behind = (accesses - 1) * kElems;
      if (last) copy_inside(s_to + behind, g_from + behind, args.g_x, g_end);
      if (first) copy_inside(s_to, g_from, args.g_x, g_end);
      if (first || last) async_fence();  // the slot's next piece comes by a bulk copy
      accesses -= last + first;
      g_from += first * kElems;
      s_to += first * kElems;
    }
    barrier_expect(&s.s_full[slot], accesses * kVectorBytes);
    if (accesses > 0) bulk_load(s_to, g_from, accesses * kVectorBytes, &s.s_full[slot]);
  }

  // What of an access lies in the tensor.
  static __device__ __forceinline__ void copy_inside(T* s_to, const T* g_from, const T* g_begin,
                                                     const T* g_end) {
#pragma unroll 1
    for (int j = 0; j < kElems; ++j) {
      if (g_from + j >= g_begin && g_from + j < g_end) s_to[j] = g_from[j];
    }
  }

  // A warp's accesses of a piece are neighbours: where a row ends, the warps behind have none.
  static __device__ __forceinline__ int first_access() {
    return threadIdx.x % Config::kThreads / kWarp * kWarp * Config::kAccesses;
  }
  static __device__ __forceinline__ int place_of(int i) {
    return first_access() + i * kWarp + threadIdx.x % kWarp;
  }

  // This thread's accesses of a piece in fp32 times `sign`; -inf where a column isn't live. Returns
  // the largest value.
  template <bool kFull>
  __device__ __forceinline__ float load(float (&r_x)[kCount], int slot, const Part& p, int done,
                                        float sign) const {
    const T* s_piece = s.s_pieces[slot];
    Accesses r_in;
#pragma unroll
    for (int i = 0; i < Config::kAccesses; ++i) {
      const int at = place_of(i);
      const bool there = kFull || done + at < p.accesses;
      r_in[i] = there ? load_words(s_piece + at * kElems) : fill_words<T>(0.f);
      to_floats<T>(r_x + i * kElems, r_in[i]);
      if constexpr (Mask::kMasked) {
#pragma unroll
        for (int j = 0; j < kElems; ++j) r_x[i * kElems + j] *= sign;
      }
      if (!kFull && !(there && p.whole(done + at))) {
        const int column = p.column + (done + at) * kElems;
#pragma unroll
        for (int j = 0; j < kElems; ++j) {
          if (!there || !p.sees(column + j)) r_x[i * kElems + j] = -INFINITY;
        }
      }
    }
    if constexpr (kFull && !Mask::kMasked) return largest<T>(r_in);
    return largest(r_x);
  }

  template <bool kFull>
  __device__ __forceinline__ void reduce(MaxSum& mine, int slot, const Part& p, int done,
                                         float sign, const Exponent<T>& exponent) const {
    if (!kFull && done + first_access() >= p.accesses) return;
    float r_x[kCount];
    const float max = load<kFull>(r_x, slot, p, done, sign);
    accumulate(mine, max, r_x, exponent);
  }

  template <bool kFull>
  __device__ __forceinline__ void finish(T* g_to, int slot, const Part& p, int done, float sign,
                                         float max, float factor,
                                         const Exponent<T>& exponent) const {
    if (!kFull && done + first_access() >= p.accesses) return give_back_slot(s, slot);
    float r_x[kCount];
    load<kFull>(r_x, slot, p, done, sign);
    give_back_slot(s, slot);
#pragma unroll
    for (float& x : r_x) x = exponent(x, max) * factor;
#pragma unroll
    for (int i = 0; i < Config::kAccesses; ++i) {
      const int at = place_of(i);
      if (!kFull && done + at >= p.accesses) continue;
      if (kFull || p.whole(done + at)) {
        store_floats<T>(g_to + at * kElems, r_x + i * kElems);
      } else {
        const int column = p.column + (done + at) * kElems;
#pragma unroll
        for (int j = 0; j < kElems; ++j) {
          if (p.sees(column + j)) g_to[at * kElems + j] = from_float<T>(r_x[i * kElems + j]);
        }
      }
    }
  }

  __device__ __forceinline__ void compute() const {
    const Exponent<T> exponent(mask.scale());
    const float sign = Mask::kMasked ? exponent.sign : 1.f;
    const int group = threadIdx.x / Config::kThreads;
    int own_turn = 0;
    for (int turn = group;; turn += Config::kGroups, ++own_turn) {
      const Claim claimed = claim(turn);
      if (claimed.row >= args.rows) return;
      const Part p = part(claimed.row);
      T* g_y = args.g_y + claimed.row * args.n;
      if constexpr (Mask::kMasked) {
        clear_columns<Config>(g_y, 0, p.begin, rank);
        clear_columns<Config>(g_y, p.end, args.n, rank);
      }
      g_y += p.column;

      // Reduce the pieces as they arrive.
      MaxSum mine = {-INFINITY, 0.f};
      Place place = claimed.place;
      for (int i = 0; i < p.pieces; ++i, place.advance()) {
        barrier_wait(&s.s_full[place.slot], place.parity);
        if (p.full(i * kPiece)) {
          reduce<true>(mine, place.slot, p, i * kPiece, sign, exponent);
        } else {
          reduce<false>(mine, place.slot, p, i * kPiece, sign, exponent);
        }
      }
      const MaxSum total = s.s_exchange[group].merge(mine, exponent, own_turn);
      const float factor = 1.f / total.sum;

      // Read them again, store the result.
      place = claimed.place;
      for (int i = 0; i < p.pieces; ++i, place.advance()) {
        T* g_to = g_y + i * kPiece * kElems;
        if (p.full(i * kPiece)) {
          finish<true>(g_to, place.slot, p, i * kPiece, sign, total.max, factor, exponent);
        } else {
          finish<false>(g_to, place.slot, p, i * kPiece, sign, total.max, factor, exponent);
        }
      }
    }
  }
};
#endif

// `g_claims` is 0 before and after the launch; there are no more clusters than rows.
template <typename Config, typename Mask>
__global__ __launch_bounds__(Config::kBlockThreads,
                             1) void softmax_ring_kernel(const RowArgs<typename Config::T> args,
                                                         const Mask mask, unsigned* g_claims) {
#if TW_HAS_CLUSTERS
  extern __shared__ __align__(128) unsigned char s_memory[];
  auto& s = *reinterpret_cast<RingShared<Config>*>(s_memory);
  const RingJob<Config, Mask> job(args, mask, s);
  run_ring<Config>(job, [&] { job.copy(g_claims); });
#endif
}

}  // namespace torchweld
