// Sums on their way from a block that has some of a tile's steps to the block that finishes it,
// through memory.
#pragma once

#include "device/block_flags.cuh"
#include "device/named_barrier.cuh"

namespace torchweld {

// A warpgroup's sums of one piece in the workspace. A block has at most one piece to hand on.
struct Sm90Parts {
  static constexpr int kThreads = 128;

  float* sums;
  BlockFlags flags;

  // Own barrier of the warpgroup: `barrier`.
  template <int kValues>
  __device__ __forceinline__ void send(const float (&v)[kValues], int64_t slot, int thread,
                                       int barrier) const {
    float4* g_to = reinterpret_cast<float4*>(sums + slot * kValues * kThreads) + thread;
#pragma unroll
    for (int i = 0; i < kValues / 4; ++i) {
      g_to[i * kThreads] = make_float4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
    }
    named_barrier_wait(barrier, kThreads);
    if (thread == 0) {
      __threadfence();
      flags.raise(slot);
    }
  }

  // Adds what another block has sent, once it is there.
  template <int kValues>
  __device__ __forceinline__ void add(float (&v)[kValues], int64_t slot, int thread,
                                      int barrier) const {
    if (thread == 0) flags.wait(slot);
    named_barrier_wait(barrier, kThreads);
    const float4* g_from =
        reinterpret_cast<const float4*>(sums + slot * kValues * kThreads) + thread;
#pragma unroll
    for (int i = 0; i < kValues / 4; ++i) {
      const float4 part = __ldcg(g_from + i * kThreads);
      v[4 * i] += part.x;
      v[4 * i + 1] += part.y;
      v[4 * i + 2] += part.z;
      v[4 * i + 3] += part.w;
    }
  }
};

}  // namespace torchweld
