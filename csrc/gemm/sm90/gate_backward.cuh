// The epilogue that computes the gradient of a gate. TMA loads boxes of the left and the right
// values into shared memory. A warp overwrites the values with their gradients, and TMA stores the
// gradients. The caller may also request the result of the gate. In that case the warp then writes
// the result into the box of the left values, and TMA stores this box in act.
//
// A pair of boxes holds the left and the right values of 16 rows and 64 columns. The first two
// pairs of a tile are loaded during the mainloop of the tile. Each further pair is loaded while the
// warp computes the gradients of the previous pair.
#pragma once

#include "device/mma_sync.cuh"
#include "gemm/sm90/gate_backward.h"
#include "gemm/sm90/kernel.cuh"

namespace torchweld::sm90 {

struct GateBackwardKernelParams : KernelParams {
  TensorMap z, dz;  // the dims are (N, M, 2 halves, 1)
  TensorMap act;    // the dims are (N, M, 1, 1)
  Gate gate;
  bool stores_act;
};

template <GemmMath kMath>
struct GateBackwardConfig
    : KernelConfig<kMath, kPingPong128x128Cluster2, /*kAKMajor=*/true, /*kBKMajor=*/false,
                   /*kGated=*/false> {
  static constexpr Tile kT = gate_backward_tile();
};

#if TW_HAS_WGMMA
template <typename T>
class GateBackwardEpilogue {
  using Store = BoxStore<T, kPingPong128x128Cluster2, /*kGated=*/false>;
  using Place = typename Store::Place;
  static constexpr Tile kT = gate_backward_tile();
  static constexpr int kPairs = kT.boxes / 2;
  static constexpr uint32_t kPairBytes = 2 * Store::kBoxBytes;
  // A thread divides its values of a box into kParts parts and handles one part at a time.
  static constexpr int kParts = 2, kPartValues = Store::kValues / kParts;
  using Part = float[kPartValues];
  static_assert(kT.pingpong && Store::kIterations == 2 * kPairs);

 public:
  using Sums = typename Store::Sums;

  // This kernel has no bias. Instead, s_bias holds kPairs mbarriers per warp, one for each pair of
  // boxes.
  __device__ __forceinline__ GateBackwardEpilogue(const GateBackwardKernelParams& p,
                                                  char* s_staging, float* s_bias, int warpgroup)
      : params_(p), store_(p, s_staging, warpgroup), lane_(threadIdx.x % 32) {
    const int warp = threadIdx.x % 128 / 32;
    s_pairs_ = shared_address(s_staging) + (warpgroup * 4 + warp) * kPairs * kPairBytes;
    s_loaded_ = reinterpret_cast<uint64_t*>(s_bias) + warp * kPairs;
    if (lane_ == 0) {
      for (int pair = 0; pair < kPairs; ++pair) mbarrier_init(s_loaded_ + pair, 1);
      mbarrier_init_fence();
      async_fence();
    }
    __syncwarp();
  }

  // Loads the first kPairs pairs of boxes of the tile.
  __device__ __forceinline__ void fetch(const WorkTile& work, int rank, bool) {
    const Place place = Store::place_of(work, rank);
    store_.template wait_for_slots<0>();
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) load(place, pair);
  }

  // NOTE: every tile loads into each pair of boxes twice, so the parity of the pair's mbarrier is
  // the same at the start of every tile.
  __device__ __forceinline__ void finish(Sums& acc, const WorkTile& work, int rank, int) {
    const Place place = Store::place_of(work, rank);
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
        gate_grad</*kExact=*/false>(left, right, reinterpret_cast<Part&>(dy[part * kPartValues]),
                                    params_.gate);
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
    }
  }

  __device__ __forceinline__ void wait() const { store_.wait(); }

 private:
  // The coordinates of the boxes of an iteration.
  static __device__ __forceinline__ Place box_place(const Place& place, int iteration) {
    return {place.row + iteration / Store::kAcross * 64,
            place.column + iteration % Store::kAcross * Store::kColumns, place.batch};
  }

  __device__ __forceinline__ void load(const Place& place, int iteration) const {
    if (lane_ != 0) return;
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
    if (lane_ != 0) return;
    const Place box = box_place(place, iteration);
    tma_store(params_.dz, s_from, box.column, box.row, 0, 0);
    tma_store(params_.dz, s_from + Store::kBoxBytes, box.column, box.row, 1, 0);
    tma_commit();
  }

  __device__ __forceinline__ void store_act(const Place& place, int iteration,
                                            uint32_t s_from) const {
    async_fence();
    __syncwarp();
    if (lane_ != 0) return;
    const Place box = box_place(place, iteration);
    tma_store(params_.act, s_from, box.column, box.row, 0, 0);
    tma_commit();
  }

  // Returns the address that this lane passes to ldmatrix and stmatrix for groups j and j + 1 of a
  // box. It is the address of 8 values of one row of the box.
  __device__ __forceinline__ uint32_t row_of(uint32_t s_box, int j) const {
    const int row = lane_ % 16;
    return s_box + row * Store::kBoxRowBytes + (Store::chunk_of(row, j + lane_ / 16) << 4);
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

  const GateBackwardKernelParams& params_;
  Store store_;
  int lane_;
  uint32_t s_pairs_;
  uint64_t* s_loaded_;
};

template <class Config>
struct EpilogueOf<Config, GateBackwardKernelParams> {
  using Type = GateBackwardEpilogue<typename Config::Result>;
};
#endif

}  // namespace torchweld::sm90
