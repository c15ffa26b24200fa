// From a warp's fp32 sums, as wgmma leaves them, to y: bias, pre-activation, activation or gate,
// rounding, and boxes of 16 rows that go through shared memory to TMA.
//
// In ping-pong the epilogue runs while the other warpgroup multiplies a tile, 512 clocks a k-block,
// and the tensor cores come first at the registers: one warp of a scheduler needs 5 to 8 clocks an
// instruction. (8192, 768) times (768, 3072) with GELU, bf16, H200: a tile is multiplied
// in 6100 clocks and finished in 9500 at first, 6500 to 8500 now. Plain stores instead of TMA
// slow the products down by a tenth; twice the boxes, or the bias loaded ahead, change
// nothing.
#pragma once

#include "device/activation.cuh"
#include "device/features.cuh"
#include "device/sm90/stmatrix.cuh"
#include "device/sm90/tma.cuh"
#include "gemm/sm90/params.h"
#include "gemm/sm90/tiles.h"

namespace torchweld {

#if TW_HAS_WGMMA
// A thread has, of 16 rows and kColumns columns: of rows g and g + 8 (g = lane / 4) the columns 2t
// and 2t + 1 (t = lane % 4) of every group of 8. v[4 j] to v[4 j + 3] are group j's, row g's first.
template <typename T, int kTile, bool kGated>
class Sm90Epilogue {
  static constexpr Sm90Tile kT = kSm90Tiles[kTile];
  static constexpr bool kExact = sizeof(T) == 4;
  static constexpr int kColumns = kT.box_columns(sizeof(T)), kGroups = kColumns / 8;
  static constexpr int kValues = kGroups * 4;  // of a thread in a box
  static constexpr int kBoxRowBytes = kColumns * sizeof(T), kBoxBytes = kT.box_bytes();
  static constexpr int kBiases = (kT.block_n + 127) / 128;  // of a thread
  static constexpr int kSlots = kT.boxes;
  // Columns of y in a tile.
  static constexpr int kTileColumns = kGated ? kT.block_n / 2 : kT.block_n;

 public:
  using Sums = float[kT.wgmma_m_tiles()][kT.block_n / 2];
  static constexpr bool kLoadsBias = true;

  // s_staging: boxes of all warps. s_bias: of the warpgroup's tile, fp32, both halves.
  __device__ __forceinline__ Sm90Epilogue(const Sm90Params& p, char* s_staging, float* s_bias,
                                          int warpgroup)
      : p_(p),
        s_boxes_(shared_address(s_staging) +
                 (warpgroup * 4 + threadIdx.x % 128 / 32) * kT.boxes * kBoxBytes),
        s_bias_(s_bias),
        lane_(threadIdx.x % 32) {}

  // The tile's bias on its way to the threads of its warpgroup, under the mainloop.
  __device__ __forceinline__ void fetch_bias(const WorkTile& work) {
    const GemmParams& p = p_.gemm;
    const GemmEpilogue& e = p.epilogue;
    const int thread = threadIdx.x % 128;
    const int64_t tile_column = work.tile_n * kTileColumns;
#pragma unroll
    for (int i = 0; i < kBiases; ++i) {
      const int at = i * 128 + thread;
      const bool right = kGated && at >= kTileColumns;
      const int64_t column = tile_column + (right ? at - kTileColumns : at);
      bias_[i] = 0;
      if (at < kT.block_n && column < p.n) {
        const int64_t from = !kGated         ? column
                             : e.interleaved ? 2 * column + right
                                             : column + (right ? p.n : 0);
        // NOTE: a conversion would wait for the load.
        bias_[i] = e.bias_fp32 || sizeof(T) == 4 ? static_cast<const uint32_t*>(e.bias)[from]
                                                 : static_cast<const uint16_t*>(e.bias)[from];
      }
    }
  }

  // Writes the fetched bias to shared memory. The caller synchronises the warpgroup before and
  // after.
  __device__ __forceinline__ void share_bias() const {
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
              p_.gemm.epilogue.bias_fp32 ? as_fp32 : to_float(*reinterpret_cast<const T*>(&bits));
        }
      }
    }
  }

  // rank: of the block in its cluster.
  __device__ __forceinline__ void finish(Sums& acc, const WorkTile& work, int rank) {
    if (p_.gemm.epilogue.preact != nullptr) {
      finish_boxes</*kPreact=*/true>(acc, work, rank);
    } else {
      finish_boxes</*kPreact=*/false>(acc, work, rank);
    }
  }

  // Before the block ends.
  __device__ __forceinline__ void wait() const {
    if (lane_ == 0) tma_wait_all();
  }

 private:
  using Flat = float[kT.wgmma_m_tiles() * kT.block_n / 2];
  static constexpr int kAcross = kTileColumns / kColumns;  // boxes side by side
  // Boxes of results of kColumns columns of y and 16 rows: y's, and those of its pre-activation.
  static constexpr int results(bool preact) { return 1 + (preact ? (kGated ? 2 : 1) : 0); }

  // Where a tile of y begins that has the warp's rows, and where a box of its results goes.
  struct Place {
    int row, column, batch;
  };
  struct Box : Place {
    int right;  // of a gated product's right half
    bool preact;
  };
  template <bool kPreact>
  __device__ __forceinline__ Box box_of(const Place& place, int result) const {
    constexpr int kResults = results(kPreact);
    const int at = result / kResults, kind = result % kResults;
    Box box = {{place.row + at / kAcross * 64, place.column + at % kAcross * kColumns, place.batch},
               kGated && kind == 1,
               kind < kResults - 1};
    if (box.preact && stores_pairs()) {
      box.column = 2 * box.column + box.right * kColumns;
      box.right = 0;
    }
    return box;
  }

  // Whether the columns of a pre-activation's halves alternate. One box of it has all columns of
  // half a box of y then.
  __device__ __forceinline__ bool stores_pairs() const {
    return kGated && p_.gemm.epilogue.interleaved;
  }

  // Rows of an iteration: both halves of a gated product's 64 rows, else a box.
  static constexpr int kSums = sizeof(Flat) / sizeof(float);
  static constexpr int kSwapAbSums = kGated ? kT.block_n / 2 : kValues;
  static constexpr int kTurns = kSums / kSwapAbSums, kSwapAbBoxes = kGated ? kAcross : 1;
  using SwapAbSums = float[kSwapAbSums];

  // NOTE: branches, not selections between all of the sums.
  template <int kTurn = 0>
  static __device__ __forceinline__ void take(SwapAbSums& v, const Flat& sums, int phase) {
    if constexpr (kTurn < kTurns) {
      if (phase == kTurn) {
#pragma unroll
        for (int i = 0; i < kSwapAbSums; ++i) {
          v[i] = sums[kTurn * kSwapAbSums + i];
          asm volatile("" : "+f"(v[i]));
        }
      } else {
        take<kTurn + 1>(v, sums, phase);
      }
    }
  }

  // NOTE: a loop, for whose iterations the sums move to other registers. Unrolled, the code is so
  // long that the time goes into fetching instructions. TMA stores a box when the next one is
  // written: the fence before that waits until the box is in shared memory.
  template <bool kPreact>
  __device__ __forceinline__ void finish_boxes(Sums& acc, const WorkTile& work, int rank) {
    const GemmEpilogue& e = p_.gemm.epilogue;
    const int warpgroup = fresh_thread() / 128 - 1;
    const int own_row = kT.pingpong ? 0 : warpgroup * 64 * kT.wgmma_m_tiles();  // of the tile
    const Place place = {(int(work.tile_m) * kT.cluster + rank) * kT.block_m + own_row +
                             fresh_thread() % 128 / 32 * 16,
                         int(work.tile_n) * kTileColumns, int(work.batch)};
    Flat& sums = reinterpret_cast<Flat&>(acc);
    int result = 0;
    const auto next_slot = [&] {
      if (result == 0) {
        wait_for_slots<0>();  // the last tile's
      } else {
        send(box_of<kPreact>(place, result - 1), (result - 1) % kSlots);
        wait_for_slots<kSlots - 1>();
      }
      return result++ % kSlots;
    };
    const auto put = [&](const float (&values)[kValues]) { stage(values, next_slot()); };
    if (!kGated && !kPreact && e.activation == Activation::kNone) {
      // There is so little to do that the sums may stay where they are.
#pragma unroll
      for (int phase = 0; phase < kTurns; ++phase) {
        auto& v = reinterpret_cast<float (&)[kValues]>(sums[phase * kSwapAbSums]);
        if (e.bias != nullptr) add_bias(v, phase % kAcross * kColumns);
        put(v);
      }
    } else {
#pragma unroll 1
      for (int phase = 0; phase < kTurns; ++phase) {
        SwapAbSums sums_of_turn;
        take(sums_of_turn, sums, phase);
#pragma unroll
        for (int c = 0; c < kSwapAbBoxes; ++c) {
          auto& v = values_of(sums_of_turn, c * kColumns);
          const int from = kGated ? c * kColumns : phase % kAcross * kColumns;  // of the tile
          if (e.bias != nullptr) add_bias(v, from);
          if constexpr (!kGated) {
            if (kPreact) put(v);
            activate<kExact>(v, e.activation);
          } else {
            auto& right = values_of(sums_of_turn, kTileColumns + c * kColumns);
            if (e.bias != nullptr) add_bias(right, kTileColumns + from);
            if constexpr (kPreact) {
              if (stores_pairs()) {
                stage_pairs<0>(v, right, next_slot());
                stage_pairs<kGroups / 2>(v, right, next_slot());
              } else {
                put(v);
                put(right);
              }
            }
            apply_gate<kExact>(v, right, e.gate);
          }
          put(v);
        }
      }
    }
    send(box_of<kPreact>(place, result - 1), (result - 1) % kSlots);
  }

  static __device__ __forceinline__ float (&values_of(SwapAbSums& sums, int column))
      [kValues] { return reinterpret_cast<float (&)[kValues]>(sums[column / 2]); }

  __device__ __forceinline__ void add_bias(float (&v)[kValues], int from) const {
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      const float2 bias = *reinterpret_cast<const float2*>(s_bias_ + from + j * 8 + lane_ % 4 * 2);
      v[4 * j] += bias.x;
      v[4 * j + 1] += bias.y;
      v[4 * j + 2] += bias.x;
      v[4 * j + 3] += bias.y;
    }
  }

  // Until the copies of all boxes but the last kPending have read them.
  template <int kPending>
  __device__ __forceinline__ void wait_for_slots() const {
    if (lane_ == 0) tma_wait_read<kPending>();
    __syncwarp();
  }

  __device__ __forceinline__ void send(const Box& box, int slot) const {
    async_fence();
    __syncwarp();
    if (box.preact ? p_.stores_preact : p_.stores_y) {
      if (lane_ == 0) {
        tma_store(box.preact ? p_.preact : p_.y, box_at(slot), box.column, box.row, box.right,
                  box.batch);
      }
    } else {
      store_rows(box, box_at(slot));
    }
    if (lane_ == 0) tma_commit();
  }

  __device__ __forceinline__ uint32_t box_at(int slot) const { return s_boxes_ + slot * kBoxBytes; }

  // The position of a 16-byte chunk of a row, as TMA reads it.
  static __device__ __forceinline__ int chunk_of(int line, int chunk) {
    return kBoxRowBytes == 128 ? swizzled_chunk(line, chunk) : chunk ^ ((line >> 1) & 3);
  }

  // The rounded values into a box.
  __device__ __forceinline__ void stage(const float (&v)[kValues], int slot) const {
    const uint32_t s_box = box_at(slot);
    if constexpr (sizeof(T) == 2) {
      const int line = lane_ % 16;
#pragma unroll
      for (int j = 0; j < kGroups; j += 2) {
        const uint32_t r[4] = {
            pack_pair<T>(v[4 * j], v[4 * j + 1]), pack_pair<T>(v[4 * j + 2], v[4 * j + 3]),
            pack_pair<T>(v[4 * j + 4], v[4 * j + 5]), pack_pair<T>(v[4 * j + 6], v[4 * j + 7])};
        store_matrix_4(s_box + line * kBoxRowBytes + (chunk_of(line, j + lane_ / 16) << 4), r);
      }
    } else {
      const int line = lane_ / 4, t = lane_ % 4;
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
        const int in = (chunk_of(line, j * 2 + t / 2) << 4) + t % 2 * 8;
        store_shared(s_box + line * kBoxRowBytes + in, v[4 * j], v[4 * j + 1]);
        store_shared(s_box + (line + 8) * kBoxRowBytes + in, v[4 * j + 2], v[4 * j + 3]);
      }
    }
  }

  // Stores the pairs of both halves of a gated product, from a group of columns on.
  template <int kFirst>
  __device__ __forceinline__ void stage_pairs(const float (&left)[kValues],
                                              const float (&right)[kValues], int slot) const {
    const uint32_t s_box = box_at(slot);
    const int line = lane_ / 4, t = lane_ % 4;
#pragma unroll
    for (int j = 0; j < kGroups / 2; ++j) {
      const float* l = left + 4 * (kFirst + j);
      const float* r = right + 4 * (kFirst + j);
      const int at = (j * 16 + t * 4) * int(sizeof(T));  // in the line
      const uint32_t s_to = s_box + line * kBoxRowBytes + (chunk_of(line, at / 16) << 4) + at % 16;
      if constexpr (sizeof(T) == 2) {
        store_shared(s_to, pack_pair<T>(l[0], r[0]), pack_pair<T>(l[1], r[1]));
        store_shared(s_to + 8 * kBoxRowBytes, pack_pair<T>(l[2], r[2]), pack_pair<T>(l[3], r[3]));
      } else {
        store_shared(s_to, l[0], r[0]);
        store_shared(s_to + 8, l[1], r[1]);
        store_shared(s_to + 8 * kBoxRowBytes, l[2], r[2]);
        store_shared(s_to + 8 * kBoxRowBytes + 8, l[3], r[3]);
      }
    }
  }

  static __device__ __forceinline__ void store_shared(uint32_t s_to, uint32_t x, uint32_t y) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(s_to), "r"(x), "r"(y) : "memory");
  }

  static __device__ __forceinline__ void store_shared(uint32_t s_to, float x, float y) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(s_to), "f"(x), "f"(y) : "memory");
  }

  static __device__ __forceinline__ T load_shared(uint32_t s_from) {
    if constexpr (sizeof(T) == 4) {
      float value;
      asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(s_from) : "memory");
      return value;
    } else {
      uint16_t bits;
      asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bits) : "r"(s_from) : "memory");
      return *reinterpret_cast<const T*>(&bits);
    }
  }

  // Element by element: rows have no 16-byte boundaries.
  __device__ __forceinline__ void store_rows(const Box& box, uint32_t s_box) const {
    const GemmParams& p = p_.gemm;
    T* g_to = static_cast<T*>(p.y) + box.batch * p.y_batch_stride + box.column;
    int64_t row_stride = p.y_row_stride, columns = p.n;
    if (box.preact) {
      g_to = static_cast<T*>(p.epilogue.preact) + box.batch * p.y_batch_stride + box.column +
             box.right * p.n;
      row_stride = kGated ? 2 * p.n : p.n;
      if (stores_pairs()) columns = row_stride;
    }
    constexpr int kChunkElems = 16 / sizeof(T);
#pragma unroll 1
    for (int line = 0; line < 16; ++line) {
      if (box.row + line >= p.m) break;
#pragma unroll
      for (int c = 0; c < kColumns; c += 32) {
        const int at = c + lane_;
        if (box.column + at < columns) {
          const uint32_t s_from = s_box + line * kBoxRowBytes +
                                  (chunk_of(line, at / kChunkElems) << 4) +
                                  at % kChunkElems * int(sizeof(T));
          g_to[(box.row + line) * row_stride + at] = load_shared(s_from);
        }
      }
    }
    __syncwarp();
  }

  const Sm90Params& p_;
  uint32_t s_boxes_;
  float* s_bias_;
  int lane_;
  uint32_t bias_[kBiases];  // as it is in memory
};
#endif

}  // namespace torchweld
