// What a warp of the kernel for few tokens reads: its columns of x, and its steps of the weight
// tile after tile, by cp.async into a ring of its own.
#pragma once

#include "ops/int4_linear/int4_decode_math.cuh"
#include "ops/int4_linear/int4_linear.h"

namespace torchweld {

// A warp's steps of K, [begin, end).
struct Int4DecodeSteps {
  int begin, end;

  __device__ __forceinline__ Int4DecodeSteps(const Int4DecodePlan& plan, const Int4DecodeTile& tile,
                                             int part, int warp) {
    const int part_begin = part * plan.part_steps;
    const uint32_t steps = min(plan.part_steps, plan.steps - part_begin);
    const int own = steps / tile.warps, more = steps % tile.warps;
    begin = part_begin + warp * own + min(warp, more);
    end = begin + own + (warp < more);
  }
  __device__ __forceinline__ int count() const { return end - begin; }
};

template <int kTile>
class Int4DecodeLoader {
  static constexpr Int4DecodeTile kT = kInt4DecodeTiles[kTile];
  using Step = Int4DecodeStep<kT.chunks>;

 public:
  __device__ __forceinline__ Int4DecodeLoader(const Int4Weight& weight, const Int4DecodePlan& plan,
                                              const Int4DecodeSteps& steps, int first_tile,
                                              int lane)
      : g_words_(reinterpret_cast<const char*>(weight.packed) + lane * 16),
        at_(first_tile * plan.steps + steps.begin),
        first_group_(first_tile * plan.groups),
        words_at_(lane * 16),
        meta_at_(lane * 8),
        begin_(steps.begin),
        end_(steps.end),
        step_(steps.begin) {
    // Lanes 0 to 3 bring 8 bytes of the scales each, lane 4 the zeros.
    const bool zeros = lane == 4;
    meta_bytes_ = zeros ? kT.kZeroBytes : kT.kScaleBytes;
    g_meta_ = zeros ? reinterpret_cast<const char*>(weight.zero)
                    : static_cast<const char*>(weight.scale) + lane * 8;
    // NOTE: opaque, so that an address is one multiply-add of a small index; the compiler would
    // compute these anew in every step.
    asm volatile(""
                 : "+l"(g_words_), "+l"(g_meta_), "+r"(words_at_), "+r"(meta_at_),
                   "+r"(meta_bytes_));
  }

  // The next step, on its way to a slot.
  __device__ __forceinline__ void load(uint32_t s_slot, const Int4DecodePlan& plan) {
    const char* g_from = g_words_ + uint64_t{at_} * kT.word_bytes();
#pragma unroll
    for (int i = 0; i < kT.chunks; ++i) {
      copy_async_16(s_slot + words_at_ + i * 512, g_from + i * 512, 16);
    }
    const uint32_t group = first_group_ + plan.group_steps.divide(step_);
    if (meta_at_ < kT.kScaleBytes + kT.kZeroBytes) {
      copy_async_8(s_slot + meta_at_ + kT.word_bytes(), g_meta_ + uint64_t{group} * meta_bytes_, 8);
    }
    ++at_;
    if (++step_ == end_) {
      step_ = begin_;
      at_ += plan.steps - (end_ - begin_);
      first_group_ += plan.groups;
    }
  }

  // A step that has arrived.
  __device__ __forceinline__ Step read(uint32_t s_slot) const {
    Step step;
#pragma unroll
    for (int i = 0; i < kT.chunks; ++i) step.words[i] = load_words_4(s_slot + words_at_ + i * 512);
    step.scale = load_word(s_slot + kT.word_bytes() + threadIdx.x % 32 / 4 * 4);
    step.zeros = load_words_2(s_slot + kT.word_bytes() + kT.kScaleBytes);
    return step;
  }

  // One straight from global memory.
  static __device__ __forceinline__ Step read(const Int4Weight& weight, const Int4DecodePlan& plan,
                                              int64_t tile, int at, int lane) {
    const char* g_from = reinterpret_cast<const char*>(weight.packed) +
                         (tile * plan.steps + at) * kT.word_bytes() + lane * 16;
    const int64_t group = tile * plan.groups + plan.group_steps.divide(at);
    Step step;
#pragma unroll
    for (int i = 0; i < kT.chunks; ++i) {
      step.words[i] = *reinterpret_cast<const uint4*>(g_from + i * 512);
    }
    step.scale = static_cast<const uint32_t*>(weight.scale)[group * 8 + lane / 4];
    step.zeros = reinterpret_cast<const uint2*>(weight.zero)[group];
    return step;
  }

 private:
  const char *g_words_, *g_meta_;
  uint32_t at_, first_group_, words_at_, meta_at_, meta_bytes_;
  int begin_, end_, step_;
};

// A warp's columns of x to shared memory, row after row.
template <typename T, int kTile>
__device__ __forceinline__ void int4_stage_x(uint32_t s_warp, const GemmParams& p,
                                             const Int4DecodePlan& plan,
                                             const Int4DecodeSteps& steps, int lane) {
  constexpr int kStepBytes = kInt4DecodeTiles[kTile].chunks * kInt4ChunkK * sizeof(T);
  const char* g_x = static_cast<const char*>(p.a.data) + int64_t{steps.begin} * kStepBytes;
  const int bytes = steps.count() * kStepBytes, tokens = static_cast<int>(p.m);
  const int64_t g_row_bytes = p.a.row_stride * sizeof(T);
#pragma unroll 1
  for (int at = lane * 16; at < bytes; at += 512) {
    const char* g_from = g_x + at;
    uint32_t s_to = s_warp + at;
#pragma unroll 4
    for (int token = 0; token < tokens; ++token) {
      copy_async_16(s_to, g_from, 16);
      s_to += plan.x_row_bytes;
      g_from += g_row_bytes;
    }
  }
}

}  // namespace torchweld
