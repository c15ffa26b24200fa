// Stores the result tiles of Hopper's matmul kernels through boxes of 16 rows. A warp rounds its
// values and writes them into a box in shared memory, and TMA copies the box to global memory. If
// TMA can't store a box, the warp copies it element by element (store_rows).
#pragma once

#include <type_traits>

#include "device/features.cuh"
#include "device/sm90/stmatrix.cuh"
#include "device/sm90/tma.cuh"
#include "gemm/sm90/params.h"
#include "gemm/sm90/tiles.h"

namespace torchweld::sm90 {

#if TW_HAS_WGMMA
// A box is divided into groups of 8 columns. With t = lane % 4 and g = lane / 4, a thread holds
// columns 2t and 2t + 1 of every group, in rows g and g + 8 of the box. In group j its values are
// v[4 j] and v[4 j + 1] in row g, and v[4 j + 2] and v[4 j + 3] in row g + 8.
template <typename T, int kTile, bool kGated, class Work = WorkTile>
class BoxStore {
 public:
  static constexpr Tile kT = kTiles[kTile];
  static constexpr int kColumns = kT.box_columns(sizeof(T)), kGroups = kColumns / 8;
  static constexpr int kValues = kGroups * 4;  // number of values of a box that one thread holds
  static constexpr int kBoxRowBytes = kColumns * sizeof(T), kBoxBytes = kT.box_bytes();
  static constexpr int kSlots = kT.boxes;
  // The number of columns of y in one tile.
  static constexpr int kTileColumns = kGated ? kT.block_n / 2 : kT.block_n;

  using Sums = float[kT.wgmma_m_tiles()][kT.block_n / 2];
  using Flat = float[kT.wgmma_m_tiles() * kT.block_n / 2];
  using Values = float[kValues];
  static constexpr int kAcross = kTileColumns / kColumns;  // number of boxes across a tile

  // s_staging holds the boxes of all warps.
  __device__ __forceinline__ BoxStore(const KernelParams& p, char* s_staging, int warpgroup)
      : p_(p),
        s_boxes_(shared_address(s_staging) +
                 (warpgroup * 4 + threadIdx.x % 128 / 32) * kT.boxes * kBoxBytes),
        lane_(threadIdx.x % 32) {}

  // NOTE: the epilogue of a gated grouped product has no register for the lane.
  __device__ __forceinline__ int lane() const {
    return Work::kGrouped ? fresh_thread() % 32 : lane_;
  }

  // Waits until TMA has written all boxes to global memory. Every warp must call this function
  // before the CTA ends.
  __device__ __forceinline__ void wait() const {
    if (lane() == 0) tma_wait_all();
  }

  // The number of boxes that are stored for 16 rows and kColumns columns of y: one box of y and, if
  // `preact` is true, one box of the pre-activation (two boxes in a gated product).
  static constexpr int results(bool preact) { return 1 + (preact ? (kGated ? 2 : 1) : 0); }

  // The start of a warp's part of the tile in y. In a Box: the start of the box in `y` or `preact`.
  struct Dense {
    int row, column, batch;
  };
  // In a product with groups of rows, the rows of the group end before rows_end.
  struct InGroup {
    int row, column, rows_end;
    static constexpr int batch = 0;
  };
  using Place = std::conditional_t<Work::kGrouped, InGroup, Dense>;
  struct Box : Place {
    int right;  // 1 for the right half of a gated product, else 0
    bool preact;
  };
  template <bool kPreact>
  __device__ __forceinline__ Box box_of(const Place& place, int result) const {
    constexpr int kResults = results(kPreact);
    const int at = result / kResults, kind = result % kResults;
    Box box = {place, kGated && kind == 1, kind < kResults - 1};
    box.row += at / kAcross * 64;
    box.column += at % kAcross * kColumns;
    if (box.preact && stores_pairs()) {
      box.column = 2 * box.column + box.right * kColumns;
      box.right = 0;
    }
    return box;
  }

  // Whether the left and right columns of the pre-activation alternate in memory. If so, a box of
  // the pre-activation holds kColumns / 2 left and kColumns / 2 right columns.
  __device__ __forceinline__ bool stores_pairs() const {
    return kGated && p_.gemm.epilogue.interleaved;
  }

  // Returns the row and the column of y at which this warp's part of the tile starts.
  static __device__ __forceinline__ Place place_of(const Work& work, int rank) {
    const int warpgroup = fresh_thread() / 128 - 1;
    // The first row of the warpgroup in the tile.
    const int first_row = kT.pingpong ? 0 : warpgroup * 64 * kT.wgmma_m_tiles();
    const int row = int(work.first_row_of(kT.cluster, rank, kT.block_m)) + first_row +
                    fresh_thread() % 128 / 32 * 16;
    const int column = int(work.first_column_of(kT.cluster, rank, kTileColumns));
    if constexpr (Work::kGrouped) {
      return {row, column, work.end_row};
    } else {
      return {row, column, int(work.batch)};
    }
  }

  // Issues the TMA store of the previous box of this tile, if there is a previous box. Returns the
  // slot for the next box.
  template <bool kPreact>
  __device__ __forceinline__ int send_last_box(const Place& place, int& result) const {
    if (result == 0) {
      wait_for_slots<0>();  // the boxes of the previous tile may still use the staging memory
    } else {
      send(box_of<kPreact>(place, result - 1), (result - 1) % kSlots);
      wait_for_slots<kSlots - 1>();
    }
    return result++ % kSlots;
  }
  template <bool kPreact>
  __device__ __forceinline__ void send_final_box(const Place& place, int result) const {
    send(box_of<kPreact>(place, result - 1), (result - 1) % kSlots);
  }

  // An iteration of the loop over a tile handles kIterationValues accumulators of a thread. These
  // belong to one box or, in a gated product, to 16 rows and all columns of the tile.
  static constexpr int kAccumulators = sizeof(Flat) / sizeof(float);
  static constexpr int kIterationValues = kGated ? kT.block_n / 2 : kValues;
  static constexpr int kIterations = kAccumulators / kIterationValues,
                       kIterationBoxes = kGated ? kAcross : 1;
  using IterationValues = float[kIterationValues];

  // Sets `v` to the accumulators of one iteration.
  // NOTE: a branch on `iteration` needs fewer instructions than a selection of each single value.
  template <int kIndex = 0>
  static __device__ __forceinline__ void copy_values(IterationValues& v, const Flat& sums,
                                                     int iteration) {
    if constexpr (kIndex < kIterations) {
      if (iteration == kIndex) {
#pragma unroll
        for (int i = 0; i < kIterationValues; ++i) {
          v[i] = sums[kIndex * kIterationValues + i];
          asm volatile("" : "+f"(v[i]));
        }
      } else {
        copy_values<kIndex + 1>(v, sums, iteration);
      }
    }
  }

  // Frees slots: waits until TMA has read all boxes except the last kPending boxes.
  template <int kPending>
  __device__ __forceinline__ void wait_for_slots() const {
    if (lane() == 0) tma_wait_read<kPending>();
    __syncwarp();
  }

  __device__ __forceinline__ void send(const Box& box, int slot) const {
    async_fence();
    __syncwarp();
    bool whole = true;
    if constexpr (Work::kGrouped) whole = box.row + 16 <= box.rows_end;
    if (whole && (box.preact ? p_.stores_preact : p_.stores_y)) {
      if (lane() == 0) {
        tma_store(box.preact ? p_.preact : p_.y, box_at(slot), box.column, box.row, box.right,
                  box.batch);
      }
    } else {
      store_rows(box, box_at(slot));
    }
    if (lane() == 0) tma_commit();
  }

  __device__ __forceinline__ uint32_t box_at(int slot) const { return s_boxes_ + slot * kBoxBytes; }

  // Returns the swizzled position of 16-byte chunk `chunk` in row `row` of a box.
  static __device__ __forceinline__ int chunk_of(int row, int chunk) {
    return kBoxRowBytes == 128 ? swizzled_chunk(row, chunk) : chunk ^ ((row >> 1) & 3);
  }

  // Rounds the values and writes them into a box.
  __device__ __forceinline__ void stage(const Values& v, int slot) const {
    const uint32_t s_box = box_at(slot);
    if constexpr (sizeof(T) == 2) {
      const int row = lane() % 16;
#pragma unroll
      for (int j = 0; j < kGroups; j += 2) {
        const uint32_t r[4] = {
            pack_pair<T>(v[4 * j], v[4 * j + 1]), pack_pair<T>(v[4 * j + 2], v[4 * j + 3]),
            pack_pair<T>(v[4 * j + 4], v[4 * j + 5]), pack_pair<T>(v[4 * j + 6], v[4 * j + 7])};
        store_matrix_4(s_box + row * kBoxRowBytes + (chunk_of(row, j + lane() / 16) << 4), r);
      }
    } else {
      const int row = lane() / 4, t = lane() % 4;
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
        const int in = (chunk_of(row, j * 2 + t / 2) << 4) + t % 2 * 8;
        store_shared(s_box + row * kBoxRowBytes + in, v[4 * j], v[4 * j + 1]);
        store_shared(s_box + (row + 8) * kBoxRowBytes + in, v[4 * j + 2], v[4 * j + 3]);
      }
    }
  }

  // Writes groups kFirst to kFirst + kGroups / 2 - 1 of both halves to a box. Each left value is
  // followed by the right value of the same column.
  template <int kFirst>
  __device__ __forceinline__ void stage_pairs(const Values& left, const Values& right,
                                              int slot) const {
    const uint32_t s_box = box_at(slot);
    const int row = lane() / 4, t = lane() % 4;
#pragma unroll
    for (int j = 0; j < kGroups / 2; ++j) {
      const float* l = left + 4 * (kFirst + j);
      const float* r = right + 4 * (kFirst + j);
      const int at = (j * 16 + t * 4) * int(sizeof(T));  // byte offset of the pair in its box row
      const uint32_t s_to = s_box + row * kBoxRowBytes + (chunk_of(row, at / 16) << 4) + at % 16;
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

  // Stores a box element by element. TMA can't store a result whose rows don't start on 16-byte
  // boundaries, and it would store the rows of a box that belong to the next group.
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
    for (int row = 0; row < 16; ++row) {
      if constexpr (Work::kGrouped) {
        if (box.row + row >= box.rows_end) break;
      } else {
        if (box.row + row >= p.m) break;
      }
#pragma unroll
      for (int c = 0; c < kColumns; c += 32) {
        const int at = c + lane();
        if (box.column + at < columns) {
          const uint32_t s_from = s_box + row * kBoxRowBytes +
                                  (chunk_of(row, at / kChunkElems) << 4) +
                                  at % kChunkElems * int(sizeof(T));
          g_to[(box.row + row) * row_stride + at] = load_shared(s_from);
        }
      }
    }
    __syncwarp();
  }

  const KernelParams& p_;
  uint32_t s_boxes_;
  int lane_;
};
#endif

}  // namespace torchweld::sm90
