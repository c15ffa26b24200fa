// The properties of a GPU that decide which kernel runs. This header does not use torch.
#pragma once

#include <algorithm>
#include <cstdint>

namespace torchweld {

struct DeviceFacts {
  int sms = 0;
  int shared_limit = 0;         // max shared memory of a block in bytes
  bool clusters = false;        // thread-block clusters
  bool clusters_of_16 = false;  // a 16-CTA cluster fits on this GPU
  bool tma = false;             // bulk copies and tensor maps
  bool wgmma = false;           // warpgroup matrix multiply
  // For each cluster size, how many clusters run at once with one block per SM, or 0 if the size
  // was not queried.
  // NOTE: a cluster stays within one GPC, and GPCs differ in the number of usable SMs.
  int active_clusters[17] = {};

  // active_clusters of a cluster size, but at least 1.
  int max_active_clusters(int size) const { return std::max(active_clusters[size], 1); }
};

// The facts of the current device, which are queried once per device. In a dry run, the facts of
// the assumed GPU. All zeros without a GPU.
const DeviceFacts& device_facts();

// The GPU that explain assumes on a machine without one.
inline constexpr DeviceFacts kH100Facts = {
    132, 232448, true, true, true, true, {0, 132, 66, 42, 32, 0, 0, 0, 15, 0, 0, 0, 0, 0, 0, 0, 6}};

}  // namespace torchweld
