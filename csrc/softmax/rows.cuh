// Row softmax and its backward under a mask, for rows that fit into registers. Each row is read
// once.
//
//   y = softmax(scale * x) over the live columns of a row, 0 elsewhere      x, y (rows, n)
//   dx = scale * y * (dy - sum(dy * y)) over the live columns, 0 elsewhere
//
// The threads of a block hold one row. If rows are short, each warp holds one row. Each thread
// loads all its accesses. Then the threads reduce (max, sum) once, and each thread stores its
// accesses. The Mask gives the live columns. Chunks without live columns are neither loaded nor
// computed.
//
// If rows are unaligned (kPeel), the first access of a row starts at the first 16-byte boundary of
// the row of the result. Each column before the first access or after the last access belongs to
// one thread. If a row of the input has a different offset from a 16-byte boundary than the row of
// the result, the row is loaded element by element.
//
// Threads keep their values as 32-bit words. The compiler would split an array of 16-bit values at
// the first condition on the array. With such an array, causal_softmax was a tenth slower. The
// kernels are in a header because causal_softmax instantiates them with its own masks.
// Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018 (for merging
// two partial results).
#pragma once

#include "softmax/config.h"
#include "softmax/parts.cuh"

namespace torchweld {

template <typename T_, int kTile, bool kPeel_>
struct RowConfig {
  using T = T_;
  static constexpr SoftmaxTile kShape = kSoftmaxTiles[kTile];
  static constexpr int kThreadsPerRow = kShape.threads;
  static constexpr int kLoads = kShape.loads;
  static constexpr int kElems = kVectorBytes / sizeof(T);
  static constexpr bool kPeel = kPeel_;
  // If a row has one warp, a block of four warps computes four rows.
  static constexpr int kThreads = kThreadsPerRow == kWarp ? 4 * kWarp : kThreadsPerRow;
  static constexpr int kRowsPerBlock = kThreads / kThreadsPerRow;
  static constexpr bool kRecomputes = kShape.recomputes(sizeof(T));
  static_assert(kThreads <= 1024 && kThreadsPerRow % kWarp == 0);
};

// The accesses of a thread in a row. Access i starts at column(i). Chunk i of the row consists of
// access i of every thread. Therefore chunk_is_live(i) is the same for all threads of a row.
template <typename Config, typename Mask>
struct RowSlice {
  using T = typename Config::T;
  static constexpr int kElems = Config::kElems;
  KeyRange32 live;
  int n;
  int lane;
  int head = 0;   // number of columns before the first aligned access
  int edge = -1;  // this thread's column outside of the aligned accesses, or -1

  __device__ __forceinline__ RowSlice(const KeyRange32& range, const T* g_result, int64_t n)
      : live(range),
        n(static_cast<int>(n)),
        lane(Config::kRowsPerBlock == 1 ? threadIdx.x : threadIdx.x % Config::kThreadsPerRow) {
    if constexpr (Config::kPeel) {
      head = min((kElems - phase_of(g_result)) % kElems, this->n);
      const int tail = (this->n - head) % kElems;
      if (lane < head) edge = lane;
      if (lane >= kElems && lane - kElems < tail) edge = this->n - tail + lane - kElems;
    }
  }

  static __device__ __forceinline__ int64_t row() {
    if constexpr (Config::kRowsPerBlock == 1) return blockIdx.x;
    return static_cast<int64_t>(blockIdx.x) * Config::kRowsPerBlock +
           threadIdx.x / Config::kThreadsPerRow;
  }
  static __device__ __forceinline__ int phase_of(const T* g_row) {
    return static_cast<int>(reinterpret_cast<uintptr_t>(g_row) % kVectorBytes / sizeof(T));
  }
  static __device__ __forceinline__ int chunk() {
    return (Config::kRowsPerBlock == 1 ? blockDim.x : Config::kThreadsPerRow) * kElems;
  }
  __device__ __forceinline__ int column(int i) const { return head + i * chunk() + lane * kElems; }

  // Whether chunk i must be processed. Without a mask no chunk is skipped, because a branch would
  // cost more than the few empty chunks.
  __device__ __forceinline__ bool chunk_is_live(int i) const {
    return !Mask::kMasked ||
           (head + i * chunk() < live.end && head + (i + 1) * chunk() > live.begin);
  }

  __device__ __forceinline__ bool in_row(int i) const {
    return column(i) + (Config::kPeel ? kElems - 1 : 0) < n;
  }

  // Loads access i of a live chunk. If the access has no live columns, sets its values to `hidden`.
  __device__ __forceinline__ void load(uint4& r_to, const T* g_row, int i, float hidden) const {
    const bool some = in_row(i) && touches<Mask>(live, column(i), kElems);
    if (some && (!Config::kPeel || phase_of(g_row + head) == 0)) {
      r_to = load_words(g_row + column(i));
      return;
    }
    r_to = fill_words<T>(hidden);
    if (Config::kPeel && some) {
      auto& r_values = reinterpret_cast<T(&)[kElems]>(r_to);
#pragma unroll
      for (int j = 0; j < kElems; ++j) r_values[j] = g_row[column(i) + j];
    }
  }

  // Loads this thread's edge column. Returns `hidden` if the thread has no edge column or the mask
  // hides the edge column.
  __device__ __forceinline__ float load_edge(const T* g_row, float hidden) const {
    return Config::kPeel && edge >= 0 && sees(live, edge) ? to_float(g_row[edge]) : hidden;
  }
  __device__ __forceinline__ void store_edge(T* g_row, float x) const {
    if (Config::kPeel && edge >= 0) g_row[edge] = from_float<T>(sees(live, edge) ? x : 0.f);
  }

  // Sets the masked columns of a loaded access to `hidden`.
  __device__ __forceinline__ void hide(uint4& r_in, int i, float hidden) const {
    if constexpr (Mask::kMasked) {
      // Only an access at a bound of the live range has both live and masked columns.
      const int to_begin = live.begin - column(i), to_end = live.end - column(i);
      if ((to_begin > 0 && to_begin < kElems) || (to_end > 0 && to_end < kElems)) {
        auto& r_values = reinterpret_cast<T(&)[kElems]>(r_in);
#pragma unroll
        for (int j = 0; j < kElems; ++j) {
          if (j < to_begin || j >= to_end) r_values[j] = from_float<T>(hidden);
        }
      }
    }
  }

  // Converts the values of an access to arguments of Exponent. The caller must have called hide().
  template <typename ExponentT>
  __device__ __forceinline__ void unpack(float (&r_to)[kElems], const uint4& r_in, int i,
                                         const ExponentT& exponent) const {
    to_floats<T>(r_to, r_in);
    if constexpr (Mask::kCapped) {
      if (exponent.scale.softcap == 0.f) return;
#pragma unroll
      for (float& x : r_to) x = exponent.capped(x);
      if (in_row(i) && column(i) >= live.begin && column(i) + kElems <= live.end) return;
#pragma unroll
      for (int j = 0; j < kElems; ++j) {
        if (!in_row(i) || !sees(live, column(i) + j)) r_to[j] = -INFINITY;
      }
    }
  }

  // Stores the results of access i. If `finite` is false, first sets masked columns to 0, because
  // masked columns then hold 0 * NaN, which is NaN.
  __device__ __forceinline__ void store(T* g_row, int i, float (&r_out)[kElems],
                                        bool finite) const {
    if (Mask::kMasked && !finite) {
#pragma unroll
      for (int j = 0; j < kElems; ++j) r_out[j] = sees(live, column(i) + j) ? r_out[j] : 0.f;
    }
    if (in_row(i)) store_floats(g_row + column(i), r_out);
  }
};

// Makes the words opaque to the compiler. If the compiler saw the words, it would compute values
// from them only once and keep these values in registers.
__device__ __forceinline__ void hold_words(uint4& r) {
  asm volatile("" : "+r"(r.x), "+r"(r.y), "+r"(r.z), "+r"(r.w));
}

template <typename Config, typename Mask>
__global__ __launch_bounds__(Config::kThreads) void softmax_kernel(
    const RowArgs<typename Config::T> args, const Mask mask) {
  using T = typename Config::T;
  constexpr int kElems = Config::kElems;
  constexpr int kLoads = Config::kLoads;
  using Slice = RowSlice<Config, Mask>;
  const int64_t row = Slice::row();
  if (Config::kRowsPerBlock > 1 && row >= args.rows) return;
  const auto exponent = exponent_of<T>(mask);
  const float hidden = -exponent.sign * INFINITY;  // -inf after multiplication by the sign
  const T* g_x = args.g_x + row * args.x_row_stride;
  T* g_y = args.g_y + row * args.n;
  const Slice slice(mask.live_columns(args.first_row + row), g_y, args.n);

  // Load: issue all loads before the first use.
  uint4 r_in[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if (slice.chunk_is_live(i)) slice.load(r_in[i], g_x, i, hidden);
  }
  float r_edge = slice.load_edge(g_x, hidden);
  // Whether the kernel stores zeros to masked chunks while the loads are in flight. fp32 does not
  // gain from this order.
  constexpr bool kZerosFirst = Mask::kMasked && sizeof(T) == 2;
  if constexpr (kZerosFirst) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      float r_zeros[kElems] = {};
      if (!slice.chunk_is_live(i)) slice.store(g_y, i, r_zeros, true);
    }
  }

  // Compute the exponentials relative to the maximum of the warp, then exchange (max, sum) once
  // between warps.
  constexpr bool kRecomputes = Config::kRecomputes;
  float r_x[kRecomputes ? 1 : kLoads][kElems];
  if (Mask::kMasked && exponent.sign < 0.f) r_edge = -r_edge;
  // NOTE: fmaxf ignores NaN, so the maximum is not NaN.
  float max = Config::kPeel ? fmaxf(r_edge, -INFINITY) : -INFINITY;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if (slice.chunk_is_live(i)) {
      slice.hide(r_in[i], i, hidden);
      if (Mask::kMasked && exponent.sign < 0.f) r_in[i] = negated<T>(r_in[i]);
      max = fmaxf(max, largest<T>(r_in[i]));
      if constexpr (!kRecomputes) slice.unpack(r_x[i], r_in[i], i, exponent);
    }
  }
  max = warp_max(max);
  if constexpr (Mask::kCapped) {
    max = exponent.capped(max);
    if (Config::kPeel && slice.edge >= 0 && sees(slice.live, slice.edge)) {
      r_edge = exponent.capped(r_edge);
    }
  }
  const float shift = finite_max(max);
  if constexpr (Config::kPeel) r_edge = exponent(r_edge, shift);
  float sum = Config::kPeel ? r_edge : 0.f;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if (slice.chunk_is_live(i)) {
      float (&r_of)[kElems] = r_x[kRecomputes ? 0 : i];
      if constexpr (kRecomputes) slice.unpack(r_of, r_in[i], i, exponent);
#pragma unroll
      for (int j = 0; j < kElems; ++j) {
        r_of[j] = exponent(r_of[j], shift);
        sum += r_of[j];
      }
    }
  }
  MaxSum total = {max, warp_sum(sum)};
  if constexpr (Config::kThreadsPerRow > kWarp) {
    __shared__ BlockExchange<Config::kThreads> s_exchange;
    total = s_exchange.merge_warps(total, exponent);
  }
  // If all scores of a row are -inf, the factor is NaN, because (-inf) - (-inf) is NaN. torch also
  // returns NaN.
  float factor = exponent.rescale(max, total.max) / total.sum;
  if constexpr (Mask::kCapped) {
    const float sink = mask.sink(args.first_row + row);
    factor = exponent.finish(total, sink).factor;
    if (!(sink > total.max && total.max == -INFINITY)) factor *= exponent.rescale(max, total.max);
  }

  if constexpr (kRecomputes) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (slice.chunk_is_live(i)) hold_words(r_in[i]);
    }
  }
  // Store the results, and zeros outside of the live range.
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if (kZerosFirst && !slice.chunk_is_live(i)) continue;
    float r_y[kElems] = {};
    if (slice.chunk_is_live(i)) {
      if constexpr (kRecomputes) slice.unpack(r_y, r_in[i], i, exponent);
#pragma unroll
      for (int j = 0; j < kElems; ++j) {
        const float x = kRecomputes ? exponent(r_y[j], shift) : r_x[kRecomputes ? 0 : i][j];
        r_y[j] = x * factor;
      }
    }
    slice.store(g_y, i, r_y, isfinite(factor));
  }
  slice.store_edge(g_y, r_edge * factor);
}

template <typename Config, typename Mask>
__global__ __launch_bounds__(Config::kThreads) void softmax_backward_kernel(
    const RowArgs<typename Config::T> args, const Mask mask) {
  using T = typename Config::T;
  constexpr int kElems = Config::kElems;
  constexpr int kLoads = Config::kLoads;
  using Slice = RowSlice<Config, Mask>;
  const int64_t row = Slice::row();
  if (Config::kRowsPerBlock > 1 && row >= args.rows) return;
  const T* g_y = args.g_x + row * args.x_row_stride;
  const T* g_dy = args.g_dy + row * args.dy_row_stride;
  T* g_dx = args.g_y + row * args.n;
  const Slice slice(mask.live_columns(args.first_row + row), g_dx, args.n);

  uint4 r_y[kLoads], r_dy[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if (slice.chunk_is_live(i)) {
      slice.load(r_y[i], g_y, i, 0.f);
      slice.load(r_dy[i], g_dy, i, 0.f);
    }
  }
  const float edge_y = slice.load_edge(g_y, 0.f), edge_dy = slice.load_edge(g_dy, 0.f);

  float dot = edge_y * edge_dy;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if (slice.chunk_is_live(i)) {
      slice.hide(r_y[i], i, 0.f);
      slice.hide(r_dy[i], i, 0.f);
      float y[kElems], dy[kElems];
      to_floats<T>(y, r_y[i]);
      to_floats<T>(dy, r_dy[i]);
#pragma unroll
      for (int j = 0; j < kElems; ++j) dot += y[j] * dy[j];
    }
  }
  dot = warp_sum(dot);
  if constexpr (Config::kThreadsPerRow > kWarp) {
    __shared__ BlockExchange<Config::kThreads> s_exchange;
    dot = s_exchange.sum_warps(dot);
  }

  const auto gradient = [&](float y, float dy) {
    const float dx = y * (dy - dot);
    return Mask::kMasked ? dx * mask.scale() : dx;
  };
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    float r_dx[kElems] = {};
    if (slice.chunk_is_live(i)) {
      float y[kElems], dy[kElems];
      to_floats<T>(y, r_y[i]);
      to_floats<T>(dy, r_dy[i]);
#pragma unroll
      for (int j = 0; j < kElems; ++j) r_dx[j] = gradient(y[j], dy[j]);
    }
    slice.store(g_dx, i, r_dx, isfinite(dot));
  }
  slice.store_edge(g_dx, gradient(edge_y, edge_dy));
}

}  // namespace torchweld
