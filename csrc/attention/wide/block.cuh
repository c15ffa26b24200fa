// The work tile, the shared memory and the producer warps of the wide kernels, which compute
// attention and its gradients for head dims above 256 on Hopper (attention/wide/kernel.cuh).
#pragma once

#include "attention/params.h"
#include "attention/tile_order.cuh"
#include "device/features.cuh"
#include "device/sm90/descriptor.h"
#include "device/sm90/pipeline.cuh"
#include "device/sm90/tma.cuh"

namespace torchweld {

// kProducts is the number of score tiles: the gradients of Q and K need S and dP. kColumns is the
// number of right rows of a step. The registers of the score warpgroup limit the product of both.
template <typename T_, int kProducts_, int kColumns_>
struct WideShape {
  using T = T_;
  static constexpr int kProducts = kProducts_, kColumns = kColumns_;
  using Tile = AttentionWideTile;
  static constexpr int kCtas = Tile::kCtas, kCtaRows = Tile::kCtaRows, kRows = Tile::kRows;
  static constexpr int kThreads = Tile::kThreads;
  static constexpr int kBoxColumns = 64, kBoxes = Tile::kDim / kBoxColumns;
  // A stage of the scores has all rows of a step and 64 columns. A stage of the sums has kSumRows
  // rows and all columns. The stages use all shared memory that the left rows leave.
  // NOTE: the time between the release of a stage and its next use is long, because both CTAs must
  // release it. With 4, 3 and 2 stages instead of 7, 2 and 1, two products lasted 1.25 times as
  // long.
  static constexpr int kScoreStages = kProducts > 1 ? 7 : Tile::kStages,
                       kSumStages = kProducts > 1 ? 2 : 4, kSumRows = 16;
  static constexpr int kLeftBoxBytes = kCtaRows * kSwizzleRowBytes,
                       kLeftBytes = kBoxes * kLeftBoxBytes;
  static constexpr int kScoreBytes = kColumns * kSwizzleRowBytes;
  static constexpr int kSumBoxBytes = kSumRows * kSwizzleRowBytes,
                       kSumBytes = kBoxes * kSumBoxBytes;
  static constexpr int kPartColumns =
      kColumns / kCtas;  // the right rows of a step that a CTA loads
  static constexpr int kOperandStages = kProducts > 1 ? 1 : 2;
  static constexpr int kOperandBytes = kColumns / 64 * kLeftBoxBytes;
};

// The work tile of a cluster: left rows [left_row, left_row + kRows) of head left_head, and right
// rows [row, end_row) of each of the heads [head, end_head).
struct WideWork {
  int sequence;
  int left_head, left_row;
  int head, end_head;
  int row, end_row;

  template <int kColumns>
  __device__ __forceinline__ int steps() const {
    return (end_head - head) * ((end_row - row + kColumns - 1) / kColumns);
  }
};

// Iterates over the right rows of a work tile, kColumns rows at a time.
template <int kColumns>
struct WideSteps {
  int row, head, left;
  const int first_row, end_row;

  __device__ __forceinline__ explicit WideSteps(const WideWork& work)
      : row(work.row),
        head(work.head),
        left(work.steps<kColumns>()),
        first_row(work.row),
        end_row(work.end_row) {}
  __device__ __forceinline__ bool has_next() const { return left > 0; }
  __device__ __forceinline__ void advance() {
    --left;
    row += kColumns;
    if (row >= end_row) {
      row = first_row;
      ++head;
    }
  }
};

template <typename Args_>
struct WideParams {
  using Args = Args_;
  // A box of `left` has the rows of a CTA. A box of `right` has the rows that a CTA loads of a
  // step. A box of `sums` has the rows of a stage.
  TensorMap left[2], right[2], sums;
  AttentionTileOrder schedule;
  Args args;
};

template <class Config>
struct WideShared {
  // The output of the CTA later overwrites left[0].
  alignas(kSwizzleAtomBytes) char left[Config::kProducts][Config::kLeftBytes];
  alignas(kSwizzleAtomBytes) char scores[Config::kScoreStages][Config::kScoreBytes];
  alignas(kSwizzleAtomBytes) char sums[Config::kSumStages][Config::kSumBytes];
  alignas(kSwizzleAtomBytes) char operand[Config::kOperandStages][Config::kOperandBytes];
  // For each step, one bit per right row. A bit is set if the operand is 0 for the row, and the row
  // of the sums may be NaN because it belongs to padding.
  alignas(16) uint32_t unseen[Config::kOperandStages][4];
  uint64_t left_full;
  PipelineBarriers<Config::kScoreStages> score_pipeline;
  PipelineBarriers<Config::kSumStages> sum_pipeline;
  PipelineBarriers<Config::kOperandStages> operand_pipeline;
  WideWork work;
  typename Config::Shared of_kernel;
};

// The tensor that a kernel writes. Rows and columns beyond `rows` and `columns` don't exist.
struct WideOutput {
  AttentionOutput tensor;
  int rows, columns;
};

#if TW_HAS_WGMMA
// Loads the left rows once, and the right rows of every step. Each CTA loads some of the rows of
// each stage and multicasts them to all CTAs of the cluster. One lane runs this function.
template <class Config>
__device__ __forceinline__ void wide_load_scores(const typename Config::Params& p,
                                                 WideShared<Config>& s) {
  const WideWork& work = s.work;
  const int rank = static_cast<int>(rank_in_cluster());
  mbarrier_arrive_expect_tx(&s.left_full, Config::kProducts * Config::kLeftBytes);
#pragma unroll
  for (int product = 0; product < Config::kProducts; ++product) {
#pragma unroll
    for (int i = 0; i < Config::kBoxes; ++i) {
      tma_load(shared_address(s.left[product]) + i * Config::kLeftBoxBytes, p.left[product],
               &s.left_full, i * Config::kBoxColumns, work.left_row + rank * Config::kCtaRows,
               work.left_head, work.sequence);
    }
  }
  PipelineState<Config::kScoreStages> state;
#pragma unroll 1
  for (WideSteps<Config::kColumns> steps(work); steps.has_next(); steps.advance()) {
#pragma unroll
    for (int product = 0; product < Config::kProducts; ++product) {
#pragma unroll 1
      for (int i = 0; i < Config::kBoxes; ++i) {
        uint64_t* s_full = s.score_pipeline.acquire(state, Config::kScoreBytes);
        tma_load_multicast(
            shared_address(s.scores[state.stage]) + rank * Config::kPartColumns * kSwizzleRowBytes,
            p.right[product], s_full, i * Config::kBoxColumns,
            steps.row + rank * Config::kPartColumns, steps.head, work.sequence,
            (1 << Config::kCtas) - 1);
        state.advance();
      }
    }
  }
}

// Loads the rows of the sums. Each CTA loads every kCtas-th box of a stage.
template <class Config>
__device__ __forceinline__ void wide_load_sums(const typename Config::Params& p,
                                               WideShared<Config>& s) {
  const int rank = static_cast<int>(rank_in_cluster());
  const int sequence = s.work.sequence;
  PipelineState<Config::kSumStages> state;
#pragma unroll 1
  for (WideSteps<Config::kColumns> steps(s.work); steps.has_next(); steps.advance()) {
#pragma unroll 1
    for (int row = 0; row < Config::kColumns; row += Config::kSumRows) {
      uint64_t* s_full = s.sum_pipeline.acquire(state, Config::kSumBytes);
#pragma unroll
      for (int i = 0; i < Config::kBoxes / Config::kCtas; ++i) {
        const int box = i * Config::kCtas + rank;
        tma_load_multicast(shared_address(s.sums[state.stage]) + box * Config::kSumBoxBytes, p.sums,
                           s_full, box * Config::kBoxColumns, steps.row + row, steps.head, sequence,
                           (1 << Config::kCtas) - 1);
      }
      state.advance();
    }
  }
}

// Releases a stage to the producers of all CTAs of the cluster. All lanes of a consumer warp call
// this function.
template <class Config>
__device__ __forceinline__ void wide_release(uint64_t* s_empty) {
  __syncwarp();
  const int lane = threadIdx.x % 32;
  if (lane < Config::kCtas) mbarrier_arrive_at(s_empty, lane);
}
#endif

}  // namespace torchweld
