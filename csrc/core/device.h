// The properties of a GPU that decide which kernel runs. This header does not use torch.
#pragma once

#include <algorithm>
#include <cstdint>

namespace torchweld {

struct DeviceFacts {
  int sms = 0;
  int shared_limit = 0;         // the maximum shared memory of a block, in bytes
  bool clusters = false;        // whether thread-block clusters are supported
  bool clusters_of_16 = false;  // whether a cluster of 16 CTAs fits on this GPU
  bool tma = false;             // whether bulk copies and tensor maps are supported
  bool wgmma = false;           // whether warpgroup matrix multiply is supported
  // active_clusters[size] is the number of clusters of `size` blocks that can run at once with one
  // block per SM. It is 0 if this size was not queried.
  // NOTE: this can be less than sms / size, because all blocks of a cluster run on one GPC, and the
  // GPCs of a GPU have different numbers of usable SMs.
  int active_clusters[17] = {};

  // Returns active_clusters[size], but at least 1.
  int max_active_clusters(int size) const { return std::max(active_clusters[size], 1); }
};

// Returns the facts of the current device. They are queried once per device. In a dry run, returns
// the facts of the GPU that the dry run assumes. Without a GPU, all facts are 0.
const DeviceFacts& device_facts();

// The facts of GPUs that a dry run can assume. torchweld.explain assumes an H100 on a machine
// without a GPU.
inline constexpr DeviceFacts kH100Facts = {
    132, 232448, true, true, true, true, {0, 132, 66, 42, 32, 0, 0, 0, 15, 0, 0, 0, 0, 0, 0, 0, 6}};
inline constexpr DeviceFacts kA100Facts = {108, 166912, false, false, false, false, {0, 108}};

}  // namespace torchweld
