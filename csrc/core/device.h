// The properties of a GPU that choosing a kernel needs. Torch-free.
#pragma once

#include <algorithm>
#include <cstdint>

namespace torchweld {

struct DeviceFacts {
  int sms = 0;
  int shared_limit = 0;         // max shared memory of a block, bytes
  bool clusters = false;        // thread-block clusters
  bool clusters_of_16 = false;  // a 16-CTA cluster fits on this GPU
  bool tma = false;             // bulk copies and tensor maps
  bool wgmma = false;           // warpgroup matrix multiply
  // By cluster size: how many clusters run at once with one block per SM; 0 for sizes not queried.
  // NOTE: a cluster stays within one GPC, and GPCs differ in their number of usable SMs.
  int active_clusters[17] = {};

  // active_clusters of a cluster size, at least 1.
  int max_active_clusters(int size) const { return std::max(active_clusters[size], 1); }
};

// Facts of the current device, queried once per device; in a dry run, facts of the assumed GPU.
// All zeros without a GPU.
const DeviceFacts& device_facts();

// The GPU that explain assumes on a machine without one.
inline constexpr DeviceFacts kH100Facts = {
    132, 232448, true, true, true, true, {0, 132, 66, 42, 32, 0, 0, 0, 15, 0, 0, 0, 0, 0, 0, 0, 6}};

}  // namespace torchweld
