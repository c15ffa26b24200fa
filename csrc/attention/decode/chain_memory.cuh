// The work of the chain engine's warps, and the memory between its two kernels (decode/chain.cuh).
#pragma once

#include "attention/decode/work.cuh"

namespace torchweld {

// The work of a warp, whose keys start at the first key of a step. The steps are those of Hopper's
// kernel: they count from the padding, or from key_start, which only a single row may have.
struct ChainWork : MaskedDecodeWork {
  int unseen;  // no row sees the first `unseen` keys of [pad, pad + keys)

  using MaskedDecodeWork::MaskedDecodeWork;
  __device__ __forceinline__ void find_keys(const AttentionParams& p) {
    MaskedDecodeWork::find_keys(p);
    const int first = p.mask.pad_32(batch);
    const int origin = p.mask.key_start ? max(first, p.mask.key_start[batch]) : first;
    unseen = keys > 0 ? (pad - origin) % p.key_grid : 0;
    pad -= unseen;
    keys += unseen;
    last_begin += unseen;
    if (begin != kSeesNothing) begin += unseen, end += unseen;
    if (first_end != INT_MAX) first_end += unseen;
  }

  __device__ __forceinline__ int steps(int step_keys) const {
    return (keys + step_keys - 1) / step_keys;
  }
};

// The memory between the two kernels. `groups` and `steps` are the numbers of groups and of steps
// of a group, kSlices is the number of keys in a step divided by 16.
template <int kSlices>
struct ChainMemory {
  // The factors that rescale O before the step, and the thread's sums of probabilities in the step,
  // of rows lane / 4 and lane / 4 + 8.
  struct Rows {
    float factor[2], sum[2];
  };
  struct Step {
    uint4 p[kSlices][kWarp];  // P as the operand A of mma
    Rows rows[kWarp];
  };
  static_assert(sizeof(Rows) == 16);

  Step* all_steps;  // (groups, steps)
  float2* maxima;   // (groups, kWarp): the maxima of rows lane / 4 and lane / 4 + 8
  // (groups, steps, kRows): the maximum of a row in a step, and `tag`. The call sets the words to 0
  // at the end. Memory that no call has used holds the tag with a chance of 2^-32.
  uint64_t* words;
  uint32_t tag;        // half of the number of the launch, and not 0
  BlockFlags stored;   // (groups, steps, columns): raised when a step is stored
  int steps, columns;  // `columns` is the number of groups of columns of V

  __device__ __forceinline__ Step& step(int64_t group, int step) const {
    return all_steps[group * steps + step];
  }
  __device__ __forceinline__ uint64_t* step_words(int64_t group, int step) const {
    return words + (group * steps + step) * AttentionDecodeTile::kRows;
  }
  __device__ __forceinline__ void publish(uint64_t* g_word, float max) const {
    const uint64_t word = uint64_t{tag} << 32 | __float_as_uint(max);
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(g_word), "l"(word) : "memory");
  }
  static __device__ __forceinline__ uint64_t load(const uint64_t* g_word) {
    uint64_t word;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(g_word) : "memory");
    return word;
  }
  __device__ __forceinline__ bool is_published(uint64_t word) const { return word >> 32 == tag; }
  __device__ __forceinline__ int64_t flag(int64_t group, int step, int column) const {
    return (group * steps + step) * columns + column;
  }
};

}  // namespace torchweld
