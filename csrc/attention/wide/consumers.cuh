// The consumer warpgroups of the wide kernels. Warpgroup 0 computes scores and converts them into
// a 16-bit operand in shared memory. Warpgroups 1 and 2 multiply this operand by the streamed rows;
// each of them has half of the columns of the output.
#pragma once

#include "attention/fwd.h"
#include "attention/wide/block.cuh"
#include "device/features.cuh"
#include "device/mma_sync.cuh"
#include "device/named_barrier.cuh"
#include "device/sm90/stmatrix.cuh"
#include "device/sm90/wgmma.cuh"

namespace torchweld {

#if TW_HAS_WGMMA
// The score warpgroup. Config::Convert is the function f.
template <class Config>
struct WideScores {
  using T = typename Config::T;
  static constexpr int kColumns = Config::kColumns;

  const typename Config::Params& p;
  WideShared<Config>& s;
  PipelineState<Config::kScoreStages> state, released;  // the next stages to read and to release
  PipelineState<Config::kOperandStages> operand_state;
  float acc[Config::kProducts][kColumns / 2];  // S, and dP if there are two products

  __device__ __forceinline__ WideScores(const typename Config::Params& p, WideShared<Config>& s)
      : p(p), s(s) {}

  __device__ __forceinline__ void run() {
    typename Config::Convert convert(p, s, threadIdx.x % 128);
    mbarrier_wait(&s.left_full, 0);
#pragma unroll 1
    for (WideSteps<kColumns> steps(s.work); steps.has_next(); steps.advance()) {
      convert.load_step(steps.row, steps.head);
      mma_scores<0>([](int) {});
      if constexpr (Config::kProducts > 1) {
        // S is complete when the second box of dP is in flight.
        mma_scores<1>([&](int box) {
          if (box == 1) exponentiate(convert, steps.row);
        });
      }
      wgmma_wait<0>();
      release();
      if constexpr (Config::kProducts > 1) {
        warpgroup_fence_operand(acc[1]);
        convert.multiply(acc[0], acc[1], steps.row);
      } else {
        exponentiate(convert, steps.row);
      }
      mbarrier_wait(&s.operand_pipeline.empty[operand_state.stage], operand_state.parity ^ 1);
      store_operand();
      convert.publish(operand_state.stage, steps.row);
      async_fence();
      __syncwarp();
      if (threadIdx.x % 32 == 0) mbarrier_arrive(&s.operand_pipeline.full[operand_state.stage]);
      operand_state.advance();
    }
    convert.finish();
  }

 private:
  // Issue a product of scores, box by box, and release the boxes before the last one. Call
  // after_box(box) when only the wgmmas of `box` are in flight.
  template <int kProduct, class AfterBox>
  __device__ __forceinline__ void mma_scores(const AfterBox& after_box) {
    discard_accumulators(acc[kProduct]);
#pragma unroll
    for (int box = 0; box < Config::kBoxes; ++box) {
      s.score_pipeline.wait(state);
      const uint64_t a = k_major_descriptor(shared_address(s.left[kProduct])),
                     b = k_major_descriptor(shared_address(s.scores[state.stage]));
      wgmma_fence();
#pragma unroll
      for (int slice = 0; slice < 4; ++slice) {
        Wgmma<T, kColumns>::template multiply<0, 0>(
            acc[kProduct], a + ((box * Config::kLeftBoxBytes + slice * 32) >> 4),
            b + ((slice * 32) >> 4), box > 0 || slice > 0);
      }
      wgmma_commit();
      if (kProduct > 0 || box > 0) {
        wgmma_wait<1>();
        release();
      }
      state.advance();
      after_box(box);
    }
  }
  // Convert S into P.
  __device__ __forceinline__ void exponentiate(typename Config::Convert& convert, int row) {
    warpgroup_fence_operand(acc[0]);
    convert.exponentiate(acc[0], row);
  }
  __device__ __forceinline__ void release() {
    wide_release<Config>(&s.score_pipeline.empty[released.stage]);
    released.advance();
  }

  // Round acc[0] to 16 bits and store it as a K-major operand, in boxes of 64 columns.
  __device__ __forceinline__ void store_operand() const {
    const int lane = threadIdx.x % 32, lane_row = lane % 16, warp = threadIdx.x / 32 % 4;
    const uint32_t s_row =
        shared_address(s.operand[operand_state.stage]) + (warp * 16 + lane_row) * kSwizzleRowBytes;
#pragma unroll
    for (int slice = 0; slice < kColumns / 16; ++slice) {
      const float* x = acc[0] + slice * 8;
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = pack_pair<T>(x[2 * i], x[2 * i + 1]);
      store_matrix_4(s_row + slice / 4 * Config::kLeftBoxBytes +
                         swizzled_chunk(lane_row, slice % 4 * 2 + lane / 16) * 16,
                     words);
    }
  }
};

// A warpgroup that computes half of the columns of the output.
template <class Config>
struct WideSums {
  using T = typename Config::T;
  static constexpr int kBoxes = Config::kBoxes / 2;

  const typename Config::Params& p;
  WideShared<Config>& s;
  const int half, thread;
  PipelineState<Config::kSumStages> state, released;
  PipelineState<Config::kOperandStages> operand_state;
  // NOTE: a kernel of 512 threads can't have a wgmma with 256 columns, because ptxas gives an
  // instruction at most 128 registers. Therefore the columns are in two parts.
  float acc[2][kBoxes * 16];

  __device__ __forceinline__ WideSums(const typename Config::Params& p, WideShared<Config>& s,
                                      int half)
      : p(p), s(s), half(half), thread(threadIdx.x % 128) {}

  __device__ __forceinline__ void run() {
#pragma unroll
    for (auto& part : acc) {
#pragma unroll
      for (float& x : part) x = 0.f;
    }
#pragma unroll 1
    for (int steps = s.work.template steps<Config::kColumns>(); steps > 0; --steps) {
      s.operand_pipeline.wait(operand_state);
      if constexpr (Config::kRescales) {
        if (s.of_kernel.rescales[operand_state.stage][thread / 32]) rescale();
      }
      if (has_unseen()) {
        mma_sums</*kZeroes=*/true>();
      } else {
        mma_sums</*kZeroes=*/false>();
      }
      operand_state.advance();
    }
    Config::wait_for_end(s);
    if constexpr (Config::kSplit) {
      store_partial();
    } else {
      epilogue();
    }
  }

 private:
  // Multiply the rows by the factors of the step.
  __device__ __forceinline__ void rescale() {
    const float* s_factor =
        s.of_kernel.factor[operand_state.stage] + thread / 32 * 16 + thread % 32 / 4;
    const float factor[2] = {s_factor[0], s_factor[8]};
#pragma unroll
    for (auto& part : acc) {
#pragma unroll
      for (int i = 0; i < kBoxes * 16; ++i) part[i] *= factor[i / 2 % 2];
    }
  }

  // Whether the step has rows that zero_unseen must zero.
  __device__ __forceinline__ bool has_unseen() const {
    if constexpr (!Config::kMasked) return false;
    const uint4 unseen = *reinterpret_cast<const uint4*>(s.unseen[operand_state.stage]);
    return (unseen.x | unseen.y | unseen.z | unseen.w) != 0;
  }

  // Multiply the operand by the rows of the sums. With kZeroes, zero unseen rows first.
  template <bool kZeroes>
  __device__ __forceinline__ void mma_sums() {
    const uint64_t a = k_major_descriptor(shared_address(s.operand[operand_state.stage]));
#pragma unroll
    for (int chunk = 0; chunk < Config::kColumns / 16; ++chunk) {
      s.sum_pipeline.wait(state);
      if constexpr (kZeroes) zero_unseen(chunk * 16);
      const uint64_t b = mn_major_descriptor(
          shared_address(s.sums[state.stage]) + half * kBoxes * Config::kSumBoxBytes,
          Config::kSumBoxBytes);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        Wgmma<T, kBoxes * 32>::template multiply<0, 1>(
            acc[i], a + ((chunk / 4 * Config::kLeftBoxBytes + chunk % 4 * 32) >> 4),
            b + ((i * kBoxes / 2 * Config::kSumBoxBytes) >> 4), 1);
      }
      wgmma_commit();
      if (chunk > 0) {
        wgmma_wait<1>();
        release();
      }
      state.advance();
    }
    wgmma_wait<0>();
    warpgroup_fence_operand(acc[0]);
    warpgroup_fence_operand(acc[1]);
    release();
    __syncwarp();
    if (thread % 32 == 0) mbarrier_arrive(&s.operand_pipeline.empty[operand_state.stage]);
  }
  __device__ __forceinline__ void release() {
    wide_release<Config>(&s.sum_pipeline.empty[released.stage]);
    released.advance();
  }

  // Zero the unseen rows of a stage, in this warpgroup's columns. The operand is 0 for these rows,
  // but the rows may be NaN. `first` is the first row of the stage in the step.
  __device__ __forceinline__ void zero_unseen(int first) {
    const uint32_t unseen = s.unseen[operand_state.stage][first / 32] >> first % 32 & 0xffff;
    if (unseen == 0) return;
    char* s_sums = s.sums[state.stage] + half * kBoxes * Config::kSumBoxBytes;
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) {  // 128 threads zero the 16 rows of a box
      if ((unseen >> thread / 8 & 1) == 0) continue;
      *reinterpret_cast<uint4*>(s_sums + i * Config::kSumBoxBytes + thread * 16) =
          make_uint4(0, 0, 0, 0);
    }
    async_fence();
    named_barrier_wait(1 + half, 128);
  }

  // Store the normalised sums in fp32.
  __device__ __forceinline__ void store_partial() {
    const int lane = thread % 32, row_of_lane = thread / 32 * 16 + lane / 4;
    const int first_row = s.work.left_row + static_cast<int>(rank_in_cluster()) * Config::kCtaRows;
    const WideOutput out = Config::output(p);
#pragma unroll
    for (int low = 0; low < 2; ++low) {
      const int row = row_of_lane + low * 8;
      if (first_row + row >= out.rows) continue;
      const float factor = Config::end_factor(p, s, row);
      float* const g_row = Config::partial_row(p, s, first_row + row);
#pragma unroll
      for (int i = 0; i < kBoxes * 8; ++i) {
        const int column = half * kBoxes * Config::kBoxColumns + i * 8 + lane % 4 * 2;
        const float* const x = &acc[i / (kBoxes * 4)][i % (kBoxes * 4) * 4 + low * 2];
        if (column < out.columns) {
          *reinterpret_cast<float2*>(g_row + column) =
              factor < 0.f ? make_float2(0.f, 0.f) : make_float2(x[0] * factor, x[1] * factor);
        }
      }
    }
  }

  // Store the output. Each warp writes its 16 rows over rows of left[0] in shared memory, then
  // copies them to global memory, 128 contiguous bytes at a time.
  __device__ __forceinline__ void epilogue() {
    const int lane = thread % 32, lane_row = lane % 16, warp = thread / 32;
    char* const s_warp =
        s.left[0] + half * kBoxes * Config::kLeftBoxBytes + warp * 16 * kSwizzleRowBytes;
    const int row_of_lane = warp * 16 + lane / 4;
    const float factor[2] = {Config::end_factor(p, s, row_of_lane),
                             Config::end_factor(p, s, row_of_lane + 8)};
#pragma unroll
    for (int i = 0; i < kBoxes * 4; ++i) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* const x = &acc[i / (kBoxes * 2)][i % (kBoxes * 2) * 8 + j * 2];
        const float scale = factor[j % 2];
        words[j] = Config::kRescales && scale < 0.f ? 0 : pack_pair<T>(x[0] * scale, x[1] * scale);
      }
      store_matrix_4(shared_address(s_warp) + i / 4 * Config::kLeftBoxBytes +
                         lane_row * kSwizzleRowBytes +
                         swizzled_chunk(lane_row, i % 4 * 2 + lane / 16) * 16,
                     words);
    }
    __syncwarp();
    const WideOutput out = Config::output(p);
    const int first_row =
        s.work.left_row + static_cast<int>(rank_in_cluster()) * Config::kCtaRows + warp * 16;
    T* const g_out = out.tensor.template row<T>(s.work.sequence, s.work.left_head, first_row);
    const int chunk = lane % 8;
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) {
      const int column = (half * kBoxes + i) * Config::kBoxColumns + chunk * 8;
      uint4 chunks[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int row = j * 4 + lane / 8;
        chunks[j] = *reinterpret_cast<const uint4*>(s_warp + i * Config::kLeftBoxBytes +
                                                    row * kSwizzleRowBytes +
                                                    swizzled_chunk(row, chunk) * 16);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int row = j * 4 + lane / 8;
        if (first_row + row < out.rows && column < out.columns) {
          *reinterpret_cast<uint4*>(g_out + row * out.tensor.row_stride + column) = chunks[j];
        }
      }
    }
  }
};
#endif

}  // namespace torchweld
