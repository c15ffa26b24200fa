// What the choice of a kernel asks of a GPU. Torch-free.
#pragma once

#include <algorithm>
#include <cstdint>

namespace torchweld {

struct DeviceFacts {
  int sms = 0;
  int shared_limit = 0;         // bytes of shared memory that one block may have
  bool clusters = false;        // thread-block clusters
  bool clusters_of_16 = false;  // one whose 16 blocks have an SM each fits
  bool tma = false;             // bulk copies, of tensor maps too
  bool wgmma = false;           // products of warpgroups
  // How many clusters of so many blocks run at once where every block has an SM for itself; 0 where
  // nobody asks.
  // NOTE: a cluster stays within one GPC, and GPCs differ in how many SMs they have left.
  int clusters_at_once[17] = {};

  // The same, at least 1.
  int most_clusters(int blocks) const { return std::max(clusters_at_once[blocks], 1); }
};

// Of the current device, asked once a device; in a dry run those of the GPU that is assumed. All
// zeros where there is no GPU.
const DeviceFacts& device_facts();

// What explain assumes where there is no GPU.
inline constexpr DeviceFacts kH100Facts = {
    132, 232448, true, true, true, true, {0, 132, 66, 42, 32, 0, 0, 0, 15, 0, 0, 0, 0, 0, 0, 0, 6}};

}  // namespace torchweld
