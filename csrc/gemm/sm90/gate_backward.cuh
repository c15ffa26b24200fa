// The epilogue that computes the gradient of a gate. TMA loads boxes of the left and the right
// values into shared memory. A warp overwrites the values with their gradients, and TMA stores the
// gradients. The caller may also request the result of the gate. In that case the warp then writes
// the result into the box of the left values, and TMA stores this box in act.
//
// A pair of boxes holds the left and the right values of 16 rows and 64 columns. The first two
// pairs of a tile are loaded during the mainloop of the tile. Each further pair is loaded while the
// warp computes the gradients of the previous pair.
//
// In a layer of experts, the product has groups of rows and every row has a weight. The epilogue
// multiplies the gradients and act by the weight. It also sums dact * act over the columns of a
// tile, which is a part of the gradient of the weight.
#pragma once

#include "device/mma_sync.cuh"
#include "gemm/sm90/gate_backward.h"
#include "gemm/sm90/grouped.cuh"

namespace torchweld::sm90 {

struct GateBackwardKernelParams : KernelParams {
  TensorMap z, dz;  // the dims are (N, M, 2 halves, 1)
  TensorMap act;    // the dims are (N, M, 1, 1)
  Gate gate;
  bool stores_act;
};

struct GroupedGateBackwardKernelParams : GateBackwardKernelParams {
  RouteWeights weights;
  void *to_dz, *to_act;
};

template <GemmMath kMath>
struct GateBackwardConfig
    : KernelConfig<kMath, kPingPong128x128Cluster2, /*kAKMajor=*/true, /*kBKMajor=*/false,
                   /*kGated=*/false> {
  static constexpr Tile kT = gate_backward_tile();
};

#if TW_HAS_WGMMA
template <typename T, class Params>
class GateBackwardEpilogue {
  static constexpr bool kGrouped = std::is_same_v<Params, GroupedGateBackwardKernelParams>;
  using Work = std::conditional_t<kGrouped, GroupedRowsWork<>, WorkTile>;
  using Store = BoxStore<T, kPingPong128x128Cluster2, /*kGated=*/false, Work>;
  using Place = typename Store::Place;
  static constexpr Tile kT = gate_backward_tile();
  static constexpr int kPairs = kT.boxes / 2;
  static constexpr uint32_t kPairBytes = 2 * Store::kBoxBytes;
  // A thread divides its values of a box into kParts parts and handles one part at a time.
  static constexpr int kParts = kGrouped ? 4 : 2, kPartValues = Store::kValues / kParts;
  using Part = float[kPartValues];
  // A thread has values of two rows of every box.
  static constexpr int kRows = 2 * Store::kIterations / Store::kAcross;
  static_assert(kT.pingpong && Store::kIterations == 2 * kPairs);

 public:
  using Sums = typename Store::Sums;

  // This kernel has no bias. Instead, s_bias holds kPairs mbarriers per warp, one for each pair of
  // boxes.
  __device__ __forceinline__ GateBackwardEpilogue(const Params& p, char* s_staging, float* s_bias,
                                                  int warpgroup)
      : params_(p), store_(p, s_staging, warpgroup), lane_(threadIdx.x % 32) {
    const int warp = threadIdx.x % 128 / 32;
    s_pairs_ = shared_address(s_staging) + (warpgroup * 4 + warp) * kPairs * kPairBytes;
    s_loaded_ = reinterpret_cast<uint64_t*>(s_bias) + warp * kPairs;
    if (lane() == 0) {
      for (int pair = 0; pair < kPairs; ++pair) mbarrier_init(s_loaded_ + pair, 1);
      mbarrier_init_fence();
      async_fence();
    }
    __syncwarp();
  }

  // Loads the first kPairs pairs of boxes of the tile.
  __device__ __forceinline__ void fetch(const Work& work, int rank, bool) {
    const Place place = Store::place_of(work, rank);
    store_.template wait_for_slots<0>();
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) load(place, pair);
  }

  // NOTE: every tile loads into each pair of boxes twice, so the parity of the pair's mbarrier is
  // the same at the start of every tile.
  __device__ __forceinline__ void finish(Sums& acc, const Work& work, int rank, int) {
    const Place place = Store::place_of(work, rank);
    float weights[kRows], dweights[2] = {};
    if constexpr (kGrouped) read_weights(weights, place);
    const auto& sums = reinterpret_cast<const typename Store::Flat&>(acc);
#pragma unroll 1
    for (int iteration = 0; iteration < Store::kIterations; ++iteration) {
      if (iteration + 1 >= kPairs && iteration + 1 < Store::kIterations) {
        // The next iteration's pair of boxes is free when TMA has read the gradients from it.
        store_.template wait_for_slots<0>();
        load(place, iteration + 1);
      }
      typename Store::Values dy;  // gate_grad overwrites dy with the result of the gate
      Store::copy_values(dy, sums, iteration);
      const uint32_t s_left = s_pairs_ + iteration % kPairs * kPairBytes,
                     s_right = s_left + Store::kBoxBytes;
      mbarrier_wait(s_loaded_ + iteration % kPairs, iteration / kPairs);
      // NOTE: without the parts, a thread would need 32 more registers, and registers would spill.
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        Part left, right;
        read_part(left, s_left, part);
        read_part(right, s_right, part);
        Part& values = reinterpret_cast<Part&>(dy[part * kPartValues]);
        if constexpr (kGrouped) {
          const bool below = iteration >= Store::kAcross;
          const float of_rows[] = {below ? weights[2] : weights[0],
                                   below ? weights[3] : weights[1]};
          weighted_gate_grad(left, right, values, of_rows, dweights);
        } else {
          gate_grad</*kExact=*/false>(left, right, values, params_.gate);
        }
        write_part(left, s_left, part);
        write_part(right, s_right, part);
      }
      store(place, iteration, s_left);
      if (params_.stores_act) {
        store_.template wait_for_slots<0>();
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          write_part(reinterpret_cast<Part&>(dy[part * kPartValues]), s_left, part);
        }
        store_act(place, iteration, s_left);
      }
      if constexpr (kGrouped) {
        if ((iteration + 1) % Store::kAcross == 0) store_dweights(dweights, place, iteration);
      }
    }
  }

  __device__ __forceinline__ void wait() const { store_.wait(); }

 private:
  // NOTE: the epilogue of a grouped product has no register for the lane.
  __device__ __forceinline__ int lane() const { return kGrouped ? fresh_thread() % 32 : lane_; }

  // The coordinates of the boxes of an iteration.
  static __device__ __forceinline__ Place box_place(const Place& place, int iteration) {
    Place box = place;
    box.row += iteration / Store::kAcross * 64;
    box.column += iteration % Store::kAcross * Store::kColumns;
    return box;
  }

  __device__ __forceinline__ void load(const Place& place, int iteration) const {
    if (lane() != 0) return;
    const Place box = box_place(place, iteration);
    uint64_t* const s_loaded = s_loaded_ + iteration % kPairs;
    const uint32_t s_to = s_pairs_ + iteration % kPairs * kPairBytes;
    mbarrier_arrive_expect_tx(s_loaded, kPairBytes);
    tma_load(s_to, params_.z, s_loaded, box.column, box.row, 0, 0);
    tma_load(s_to + Store::kBoxBytes, params_.z, s_loaded, box.column, box.row, 1, 0);
  }

  __device__ __forceinline__ void store(const Place& place, int iteration, uint32_t s_from) const {
    async_fence();
    __syncwarp();
    const Place box = box_place(place, iteration);
    if constexpr (kGrouped) {
      if (is_last(box)) {
        const int64_t n = params_.gemm.n;
        T* const g_dz = static_cast<T*>(params_.to_dz);
        store_rows(g_dz, 2 * n, box, s_from);
        return store_rows(g_dz + n, 2 * n, box, s_from + Store::kBoxBytes);
      }
    }
    if (lane() != 0) return;
    tma_store(params_.dz, s_from, box.column, box.row, 0, 0);
    tma_store(params_.dz, s_from + Store::kBoxBytes, box.column, box.row, 1, 0);
    tma_commit();
  }

  __device__ __forceinline__ void store_act(const Place& place, int iteration,
                                            uint32_t s_from) const {
    async_fence();
    __syncwarp();
    const Place box = box_place(place, iteration);
    if constexpr (kGrouped) {
      if (is_last(box)) {
        return store_rows(static_cast<T*>(params_.to_act), params_.gemm.n, box, s_from);
      }
    }
    if (lane() != 0) return;
    tma_store(params_.act, s_from, box.column, box.row, 0, 0);
    tma_commit();
  }

  // Whether a box has rows behind those of the group. TMA would store these rows too.
  static __device__ __forceinline__ bool is_last(const Place& box) {
    return box.row + 16 > box.rows_end;
  }

  // Stores the rows of the group of such a box. A lane stores 16 bytes at a time.
  __device__ __forceinline__ void store_rows(T* g_to, int64_t row_stride, const Place& box,
                                             uint32_t s_from) const {
    constexpr int kChunks = Store::kBoxRowBytes / 16, kChunkElems = 16 / sizeof(T);
    const int chunk = lane() % kChunks, column = box.column + chunk * kChunkElems;
    for (int row = lane() / kChunks; box.row + row < box.rows_end; row += 32 / kChunks) {
      if (row >= 16 || column >= params_.gemm.n) break;
      *reinterpret_cast<uint4*>(g_to + (box.row + row) * row_stride + column) =
          load_words_4(s_from + row * Store::kBoxRowBytes + (Store::chunk_of(row, chunk) << 4));
    }
    __syncwarp();
  }

  // Returns row i of this thread: it has rows lane / 4 and lane / 4 + 8 of every box.
  __device__ __forceinline__ int row_of_thread(const Place& place, int i) const {
    return place.row + i / 2 * 64 + i % 2 * 8 + lane() / 4;
  }

  __device__ __forceinline__ void read_weights(float (&weights)[kRows], const Place& place) const {
    const RouteWeights& from = params_.weights;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = row_of_thread(place, i);
      const int route = row < place.rows_end ? from.order[row] : 0;
      weights[i] = from.fp32 ? static_cast<const float*>(from.weight)[route]
                             : to_float(static_cast<const T*>(from.weight)[route]);
    }
  }

  // Computes the gradients of one part of a box. `values` is dact and becomes the weighted act.
  // Adds dact * act to the sums of both rows.
  static __device__ __forceinline__ void weighted_gate_grad(Part& left, Part& right, Part& values,
                                                            const float (&weights)[2],
                                                            float (&dweights)[2]) {
    Part dact;
#pragma unroll
    for (int i = 0; i < kPartValues; ++i) {
      dact[i] = values[i];
      values[i] *= weights[i / 2 % 2];
    }
    gate_grad</*kExact=*/false>(left, right, values, Gate::kSwiglu);
#pragma unroll
    for (int i = 0; i < kPartValues; ++i) {
      dweights[i / 2 % 2] = fmaf(dact[i], values[i], dweights[i / 2 % 2]);
      values[i] *= weights[i / 2 % 2];
    }
  }

  // Stores the sums of two rows over the columns of this tile, and sets them to zero.
  __device__ __forceinline__ void store_dweights(float (&sums)[2], const Place& place,
                                                 int iteration) const {
    const int part = place.column / Store::kTileColumns, first = iteration / Store::kAcross * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sums[i] += __shfl_xor_sync(~0u, sums[i], 1);
      sums[i] += __shfl_xor_sync(~0u, sums[i], 2);
      const int row = row_of_thread(place, first + i);
      const bool there = row < place.rows_end && place.column < params_.gemm.n;
      if (there && lane() % 4 == 0 && params_.weights.dweight_parts != nullptr) {
        params_.weights.dweight_parts[int64_t(part) * params_.gemm.m + row] = sums[i];
      }
      sums[i] = 0.f;
    }
  }

  // Returns the address that this lane passes to ldmatrix and stmatrix for groups j and j + 1 of a
  // box. It is the address of 8 values of one row of the box.
  __device__ __forceinline__ uint32_t row_of(uint32_t s_box, int j) const {
    const int row = lane() % 16;
    return s_box + row * Store::kBoxRowBytes + (Store::chunk_of(row, j + lane() / 16) << 4);
  }

  __device__ __forceinline__ void read_part(Part& v, uint32_t s_box, int part) const {
#pragma unroll
    for (int j = 0; j < kPartValues / 4; j += 2) {
      uint32_t words[4];
      load_matrix_4(words, row_of(s_box, part * kPartValues / 4 + j));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack_pair<T>(words[i]);
        v[4 * j + 2 * i] = pair.x;
        v[4 * j + 2 * i + 1] = pair.y;
      }
    }
  }

  __device__ __forceinline__ void write_part(const Part& v, uint32_t s_box, int part) const {
#pragma unroll
    for (int j = 0; j < kPartValues / 4; j += 2) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        words[i] = pack_pair<T>(v[4 * j + 2 * i], v[4 * j + 2 * i + 1]);
      }
      store_matrix_4(row_of(s_box, part * kPartValues / 4 + j), words);
    }
  }

  const Params& params_;
  Store store_;
  int lane_;
  uint32_t s_pairs_;
  uint64_t* s_loaded_;
};

template <class Config>
struct EpilogueOf<Config, GateBackwardKernelParams> {
  using Type = GateBackwardEpilogue<typename Config::Result, GateBackwardKernelParams>;
};

template <class Config>
struct ScheduleOf<Config, GroupedGateBackwardKernelParams>
    : ScheduleOf<Config, GroupedKernelParams<Grouped::kRows>> {};

template <class Config>
struct EpilogueOf<Config, GroupedGateBackwardKernelParams> {
  using Type = GateBackwardEpilogue<typename Config::Result, GroupedGateBackwardKernelParams>;
};
#endif

}  // namespace torchweld::sm90
