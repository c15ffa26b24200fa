// The pipeline of shared-memory stages between a producer and its consumers: the position of a
// thread in it, and the full and empty barrier of each stage.
#pragma once

#include "device/features.cuh"
#include "device/sm90/mbarrier.cuh"

namespace torchweld {

// The current stage, and the parity of that stage's phase.
template <int kStages>
struct PipelineState {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (kStages == 1 || ++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ __forceinline__ void advance(int stages) {
    const int to = stage + stages, phases = to / kStages;
    stage = to - phases * kStages;
    parity ^= phases & 1;
  }
};

// NOTE: the parity is one bit, so it can't distinguish phase n from phase n + 2. A thread that
// waits on a barrier must observe every phase of it.
template <int kStages>
struct PipelineBarriers {
  uint64_t full[kStages], empty[kStages];

#if TW_HAS_CLUSTERS
  // `releases` is the number of arrivals that release a stage.
  __device__ __forceinline__ void init(uint32_t releases) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&full[i], 1);
      mbarrier_init(&empty[i], releases);
    }
  }
  // The producer waits until the consumers have released the stage, and expects `bytes`.
  __device__ __forceinline__ uint64_t* acquire(const PipelineState<kStages>& at, uint32_t bytes) {
    mbarrier_wait(&empty[at.stage], at.parity ^ 1);
    mbarrier_arrive_expect_tx(&full[at.stage], bytes);
    return &full[at.stage];
  }
  // A consumer waits until the stage is full.
  __device__ __forceinline__ void wait(const PipelineState<kStages>& at) {
    mbarrier_wait(&full[at.stage], at.parity);
  }
#endif
};

}  // namespace torchweld
