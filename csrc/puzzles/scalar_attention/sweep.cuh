// The sweep over all pairs (i, j) that computes scalar_attention and its gradient.
//
// A Job defines the owned elements, the streamed elements, and the terms that a pair adds to the
// sums of its owned element:
//   Owner, Stream               an owned element in registers, a streamed element in shared memory
//   owner(i), stream<kFast>(i)  load element i as an Owner or as a Stream
//   row, key                    return the exponent of the row and the key of a pair
//   fast_owner, fast_stream     whether an element allows the fast exponential (true for keys)
//   prepare, add, factor        prepares an owner for a stage, adds a pair, scales the owner's sums
// A block owns kThreads * kOwners elements and streams its split of the other side through shared
// memory. A stage is the streamed elements that are in shared memory at one time. For each stage,
// the block chooses the fast or the general exponential. Each chunk of a few streamed elements has
// its own accumulator, so that the error grows with the size of a chunk, not with n. Each split
// writes its partials. A second kernel adds the partials in order, so results have the same bits in
// every run.
#pragma once

#include "device/vec.cuh"
#include "puzzles/scalar_attention/config.h"
#include "puzzles/scalar_attention/exponent.cuh"

namespace torchweld {

// The arguments of a sweep. The vectors are contiguous fp32 vectors. In the forward, the vectors
// that only the backward needs are nullptr.
struct ScalarAttentionArgs {
  const KeyRange* g_keys;
  const float *g_q, *g_k, *g_v, *g_dz, *g_mean, *g_sum;
  float v_scale;
  float* g_partials;  // (splits, kSums, n)
  int64_t n;
  int64_t per_split;
  int64_t owner_blocks;
};

template <ScalarAttentionSweep kSweep, int kTile>
struct SweepShape {
  static constexpr ScalarAttentionTile kShape = kScalarAttentionTiles[kSweep][kTile];
  static constexpr int kOwners = kShape.owners;
  static constexpr int kPolynomial = kShape.polynomial;
  static constexpr int kChunk = kShape.chunk;
  static_assert(kPolynomial <= kOwners && kScalarAttentionStage % kChunk == 0);
};

template <bool kFast, typename Job>
__device__ __forceinline__ void sweep_stage(typename Job::Owner (&r_owner)[Job::kOwners],
                                            const typename Job::Stream* s_stream, int count,
                                            KeyRange keys,
                                            float (&r_total)[Job::kOwners][Job::kSums]) {
#pragma unroll
  for (int r = 0; r < Job::kOwners; ++r) Job::template prepare<kFast>(r_owner[r], keys);
#pragma unroll 1
  for (int first = 0; first < count; first += Job::kChunk) {
    const int end = min(count, first + Job::kChunk);
    float r_sum[Job::kOwners][Job::kSums] = {};
#pragma unroll 4
    for (int j = first; j < end; ++j) {
      const typename Job::Stream stream = s_stream[j];
#pragma unroll
      for (int r = 0; r < Job::kOwners; ++r) {
        const RowExponent row = Job::row(r_owner[r], stream);
        const float k = Job::key(r_owner[r], stream);
        const float e = kFast && r < Job::kPolynomial ? exponential_polynomial(row, k)
                                                      : exponential<kFast>(row, k);
        Job::add(r_sum[r], e, r_owner[r], stream);
      }
    }
#pragma unroll
    for (int r = 0; r < Job::kOwners; ++r) {
#pragma unroll
      for (int s = 0; s < Job::kSums; ++s) r_total[r][s] += r_sum[r][s];
    }
  }
}

// Loads a stage. Returns whether the elements of this thread allow the fast exponential.
template <bool kFast, typename Job>
__device__ __forceinline__ bool load_stage(const Job& job, typename Job::Stream* s_stream,
                                           int64_t first, int count) {
  bool fast = true;
  for (int j = threadIdx.x; j < count; j += kScalarAttentionThreads) {
    fast = fast && job.fast_stream(first + j);
    s_stream[j] = job.template stream<kFast>(first + j);
  }
  return fast;
}

template <typename Job>
__global__ __launch_bounds__(kScalarAttentionThreads,
                             6) void scalar_attention_sweep_kernel(const ScalarAttentionArgs args) {
  __shared__ typename Job::Stream s_stream[kScalarAttentionStage];
  const Job job(args);
  const int64_t split = blockIdx.x / args.owner_blocks;
  const int64_t block = blockIdx.x - split * args.owner_blocks;
  const int64_t first = block * (Job::kOwners * kScalarAttentionThreads) + threadIdx.x;

  typename Job::Owner r_owner[Job::kOwners];
  bool fast_owners = true;
#pragma unroll
  for (int r = 0; r < Job::kOwners; ++r) {
    // Threads behind the last element load the last element and write nothing.
    const int64_t i = first + r * kScalarAttentionThreads;
    r_owner[r] = job.owner(i < args.n ? i : args.n - 1);
    fast_owners = fast_owners && job.fast_owner(r_owner[r]);
  }
  fast_owners = __syncthreads_and(fast_owners);

  float r_total[Job::kOwners][Job::kSums] = {};
  const int64_t begin = split * args.per_split;
  const int64_t end = begin + args.per_split < args.n ? begin + args.per_split : args.n;
  for (int64_t stage = begin; stage < end; stage += kScalarAttentionStage) {
    const int count =
        end - stage < kScalarAttentionStage ? static_cast<int>(end - stage) : kScalarAttentionStage;
    bool fast = fast_owners;
    if (fast) fast = __syncthreads_and(load_stage<true>(job, s_stream, stage, count));
    if (!fast) {
      load_stage<false>(job, s_stream, stage, count);
      __syncthreads();
    }
    if (fast) {
      sweep_stage<true, Job>(r_owner, s_stream, count, job.keys, r_total);
    } else {
      sweep_stage<false, Job>(r_owner, s_stream, count, job.keys, r_total);
    }
    __syncthreads();  // all threads are done with the stage
  }

#pragma unroll
  for (int r = 0; r < Job::kOwners; ++r) {
    const int64_t i = first + r * kScalarAttentionThreads;
    if (i >= args.n) continue;
    const float factor = job.factor(r_owner[r], fast_owners);
#pragma unroll
    for (int s = 0; s < Job::kSums; ++s) {
      args.g_partials[(split * Job::kSums + s) * args.n + i] = r_total[r][s] * factor;
    }
  }
}

// Adds up the partials of an owned element in the order of the splits.
template <int kSums>
__device__ __forceinline__ void reduce_splits(float (&r_sum)[kSums], const float* g_partials,
                                              int splits, int64_t n, int64_t i) {
#pragma unroll
  for (int s = 0; s < kSums; ++s) r_sum[s] = g_partials[s * n + i];
  for (int64_t split = 1; split < splits; ++split) {
#pragma unroll
    for (int s = 0; s < kSums; ++s) r_sum[s] += g_partials[(split * kSums + s) * n + i];
  }
}

}  // namespace torchweld
