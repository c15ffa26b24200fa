// The pipeline of shared-memory stages between a producer and its consumers. PipelineState is the
// position of a thread in the pipeline. PipelineBarriers holds a full barrier and an empty barrier
// for each stage.
#pragma once

#include "device/features.cuh"
#include "device/sm90/mbarrier.cuh"

namespace torchweld {

// The current stage of a thread, and the parity of the current phase of this stage's barriers.
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

// Returns the position of item number `item` of the pipeline. The first item has number 0.
// NOTE: a number needs one register, and a PipelineState that advances needs two.
template <int kStages>
__device__ __forceinline__ PipelineState<kStages> pipeline_state_of(unsigned item) {
  return {static_cast<int>(item % kStages), item / kStages & 1};
}

// NOTE: the parity is one bit, so it can't distinguish phase n of a barrier from phase n + 2.
// Therefore a thread that waits on a barrier must wait for every phase of this barrier.
template <int kStages>
struct PipelineBarriers {
  uint64_t full[kStages], empty[kStages];

#if TW_HAS_CLUSTERS
  // Initialises the barriers. An empty barrier needs `releases` arrivals, after which its stage is
  // released. A full barrier needs `fills` arrivals, after which its stage is full.
  __device__ __forceinline__ void init(uint32_t releases, uint32_t fills = 1) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&full[i], fills);
      mbarrier_init(&empty[i], releases);
    }
  }
  // For the producer: waits until the consumers have released the stage. Then adds `bytes` to the
  // number of bytes that the stage's full barrier expects. Returns the full barrier.
  __device__ __forceinline__ uint64_t* acquire(const PipelineState<kStages>& at, uint32_t bytes) {
    mbarrier_wait(&empty[at.stage], at.parity ^ 1);
    mbarrier_arrive_expect_tx(&full[at.stage], bytes);
    return &full[at.stage];
  }
  // For a consumer: waits until the stage is full.
  __device__ __forceinline__ void wait(const PipelineState<kStages>& at) {
    mbarrier_wait(&full[at.stage], at.parity);
  }
#endif
};

}  // namespace torchweld
