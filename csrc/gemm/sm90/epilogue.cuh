// The linear epilogue of wgmma's fp32 accumulators, box by box.
//
// In ping-pong tiles one warpgroup runs its epilogue while the other warpgroup multiplies; a
// k-block takes 512 clocks. The tensor cores have priority at the register file, so a warp in the
// epilogue needs 5 to 8 clocks per instruction. For (8192, 768) times (768, 3072) with GELU in bf16
// on an H200, a tile needs 6100 clocks for its mainloop and 6500 to 8500 for its epilogue (9500 in
// the first version of this code). With plain stores instead of TMA, this product is a tenth
// slower. Neither twice as many boxes nor earlier loads of the bias change its time.
#pragma once

#include "device/named_barrier.cuh"
#include "gemm/linear_epilogue.cuh"
#include "gemm/sm90/box_store.cuh"
#include "gemm/sm90/named_barriers.h"

namespace torchweld::sm90 {

#if TW_HAS_WGMMA
// The bias of a warpgroup's tile. In a gated tile this is the bias of both halves.
template <typename T, int kTile, bool kGated, class Work = WorkTile>
class TileBias {
  using Store = BoxStore<T, kTile, kGated, Work>;
  static constexpr Tile kT = kTiles[kTile];
  static constexpr int kBiases = (kT.block_n + 127) / 128;  // the number of bias values per thread
  static constexpr int kTileColumns = Store::kTileColumns;

 public:
  // s_bias is shared memory for the bias in fp32.
  __device__ __forceinline__ TileBias(const GemmParams& p, float* s_bias)
      : p_(p), s_bias_(s_bias) {}

  __device__ __forceinline__ bool given() const { return p_.epilogue.bias != nullptr; }

  // Loads the bias of the tile into registers while the mainloop runs.
  __device__ __forceinline__ void fetch(const Work& work, int rank = 0) {
    const GemmEpilogue& e = p_.epilogue;
    const int thread = threadIdx.x % 128;
    const int64_t tile_column = work.first_column_of(kT.cluster, rank, kTileColumns);
#pragma unroll
    for (int i = 0; i < kBiases; ++i) {
      const int at = i * 128 + thread;
      const bool right = kGated && at >= kTileColumns;
      const int64_t column = tile_column + (right ? at - kTileColumns : at);
      bias_[i] = 0;
      if (at < kT.block_n && column < p_.n) {
        int64_t from = !kGated         ? column
                       : e.interleaved ? 2 * column + right
                                       : column + (right ? p_.n : 0);
        if constexpr (Work::kGrouped) from += work.batch * (kGated ? 2 * p_.n : p_.n);
        // NOTE: bias_ holds the loaded bits. A conversion to fp32 here would wait for the load.
        bias_[i] = e.bias_fp32 || sizeof(T) == 4 ? static_cast<const uint32_t*>(e.bias)[from]
                                                 : static_cast<const uint16_t*>(e.bias)[from];
      }
    }
  }

  // Writes the bias, which fetch loaded into registers, to shared memory.
  __device__ __forceinline__ void share(int warpgroup) const {
    // Wait until all warps have read the bias of the previous tile. Ping-pong tiles need no wait
    // here, because all warps have met at a barrier after these reads.
    if (!kT.pingpong) named_barrier_wait(kWarpgroupWg0 + warpgroup, 128);
#pragma unroll
    for (int i = 0; i < kBiases; ++i) {
      const int at = i * 128 + int(threadIdx.x) % 128;
      if (kT.block_n % 128 == 0 || at < kT.block_n) {
        const float as_fp32 = __uint_as_float(bias_[i]);
        if constexpr (sizeof(T) == 4) {
          s_bias_[at] = as_fp32;
        } else {
          const uint16_t bits = uint16_t(bias_[i]);
          s_bias_[at] =
              p_.epilogue.bias_fp32 ? as_fp32 : to_float(*reinterpret_cast<const T*>(&bits));
        }
      }
    }
    named_barrier_wait(kWarpgroupWg0 + warpgroup, 128);
  }

  // Adds the bias of columns [from, from + Store::kColumns) of the tile to the values of a box.
  __device__ __forceinline__ void add(typename Store::Values& v, int from) const {
#pragma unroll
    for (int j = 0; j < Store::kGroups; ++j) {
      const float2 bias =
          *reinterpret_cast<const float2*>(s_bias_ + from + j * 8 + threadIdx.x % 4 * 2);
      v[4 * j] += bias.x;
      v[4 * j + 1] += bias.y;
      v[4 * j + 2] += bias.x;
      v[4 * j + 3] += bias.y;
    }
  }

 private:
  const GemmParams& p_;
  float* s_bias_;
  uint32_t bias_[kBiases];  // the bits of the bias, as loaded from memory
};

template <typename T, int kTile, bool kGated_, class Work = WorkTile>
class BoxEpilogue {
  using Store = BoxStore<T, kTile, kGated_, Work>;
  using Values = typename Store::Values;
  using Place = typename Store::Place;

 public:
  using Sums = typename Store::Sums;

  __device__ __forceinline__ BoxEpilogue(const KernelParams& p, char* s_staging, float* s_bias,
                                         int warpgroup)
      : e_(p.gemm.epilogue), bias_(p.gemm, s_bias), store_(p, s_staging, warpgroup) {}

  // Starts the loads that the epilogue of the tile needs. `ends` is whether this CTA runs it.
  __device__ __forceinline__ void fetch(const Work& work, int rank, bool ends) {
    if (bias_.given() && ends) bias_.fetch(work, rank);
  }

  // Stores the results of the tile. `rank` is the rank of the CTA in its cluster.
  __device__ __forceinline__ void finish(Sums& acc, const Work& work, int rank, int warpgroup) {
    if (bias_.given()) bias_.share(warpgroup);
    const Place place = Store::place_of(work, rank);
    auto& sums = reinterpret_cast<typename Store::Flat&>(acc);
    e_.preact != nullptr ? finish_boxes</*kPreact=*/true>(sums, place)
                         : finish_boxes</*kPreact=*/false>(sums, place);
  }

  __device__ __forceinline__ void wait() const { store_.wait(); }

 private:
  // The values of a box. Their first column is column `from` of the tile.
  template <bool kPreact, bool kActivates_>
  struct Fragment {
    static constexpr bool kGated = kGated_, kActivates = kActivates_;
    const BoxEpilogue& epilogue;
    const Place& place;
    int& result;  // the number of boxes of the tile that have been written
    int from;
    Values &values, &partner;

    __device__ __forceinline__ bool stores_preact() const { return kPreact; }
    __device__ __forceinline__ bool pair_up() const { return true; }
    __device__ __forceinline__ void add_bias() {
      epilogue.bias_.add(values, from);
      if (kGated) epilogue.bias_.add(partner, Store::kTileColumns + from);
    }
    __device__ __forceinline__ void store_preact() {
      if (kGated && epilogue.store_.stores_pairs()) {
        epilogue.store_.template stage_pairs<0>(values, partner, next_slot());
        epilogue.store_.template stage_pairs<Store::kGroups / 2>(values, partner, next_slot());
      } else {
        put(values);
        if (kGated) put(partner);
      }
    }
    __device__ __forceinline__ void store() { put(values); }

   private:
    __device__ __forceinline__ int next_slot() {
      return epilogue.store_.template send_last_box<kPreact>(place, result);
    }
    __device__ __forceinline__ void put(const Values& v) { epilogue.store_.stage(v, next_slot()); }
  };

  // NOTE: with an activation, a gate or a pre-activation the loop is not unrolled, because
  // instruction fetch would limit the speed of the unrolled code. Every iteration copies its
  // accumulators to the same registers. The TMA store of a box is issued only after the next box
  // has been written, because the fence before the store waits until the writes of the box have
  // reached shared memory.
  template <bool kPreact>
  __device__ __forceinline__ void finish_boxes(typename Store::Flat& sums,
                                               const Place& place) const {
    constexpr bool kExact = sizeof(T) == 4;
    constexpr int kColumns = Store::kColumns;
    int result = 0;
    if (!kGated_ && !kPreact && e_.activation == Activation::kNone) {
      // Without an activation the loop body is short, so this loop is unrolled and the accumulators
      // are not copied.
#pragma unroll
      for (int iteration = 0; iteration < Store::kIterations; ++iteration) {
        auto& v = reinterpret_cast<Values&>(sums[iteration * Store::kIterationValues]);
        linear_epilogue<kExact>(
            e_, Fragment<kPreact, /*kActivates=*/false>{
                    *this, place, result, iteration % Store::kAcross * kColumns, v, v});
      }
    } else {
#pragma unroll 1
      for (int iteration = 0; iteration < Store::kIterations; ++iteration) {
        typename Store::IterationValues values;
        Store::copy_values(values, sums, iteration);
#pragma unroll
        for (int c = 0; c < Store::kIterationBoxes; ++c) {
          const int from = (kGated_ ? c : iteration % Store::kAcross) * kColumns;
          auto& v = reinterpret_cast<Values&>(values[c * kColumns / 2]);
          auto& partner = reinterpret_cast<Values&>(
              values[kGated_ ? (Store::kTileColumns + c * kColumns) / 2 : 0]);
          linear_epilogue<kExact>(
              e_, Fragment<kPreact, /*kActivates=*/true>{*this, place, result, from, v, partner});
        }
      }
    }
    store_.template send_final_box<kPreact>(place, result);
  }

  const GemmEpilogue& e_;
  TileBias<T, kTile, kGated_, Work> bias_;
  Store store_;
};
#endif

}  // namespace torchweld::sm90
