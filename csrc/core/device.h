// What the choice of a kernel asks of a GPU. Torch-free.
#pragma once

#include <cstdint>

namespace torchweld {

struct DeviceFacts {
  int sms = 0;
  int shared_limit = 0;         // bytes of shared memory that one block may have
  bool clusters = false;        // thread-block clusters
  bool clusters_of_16 = false;  // one whose 16 blocks have an SM each fits
  bool tma = false;             // bulk copies, of tensor maps too
  bool wgmma = false;           // products of warpgroups
  // How many clusters of 2^i blocks run at once where every block has an SM for itself.
  // NOTE: a cluster stays within one GPC, and GPCs differ in how many SMs they have left.
  int clusters_at_once[5] = {};

  // Of clusters of so many blocks, a power of two up to 16; at least 1.
  int most_clusters(int blocks) const {
    int i = 0;
    while (i < 4 && 1 << i < blocks) ++i;
    return clusters_at_once[i] > 0 ? clusters_at_once[i] : 1;
  }
};

// Of the current device, asked once a device; in a dry run those of the GPU that is assumed. All
// zeros where there is no GPU.
const DeviceFacts& device_facts();

// What explain assumes where there is no GPU.
inline constexpr DeviceFacts kH100Facts = {
    132, 232448, true, true, true, true, {132, 66, 32, 15, 6}};

}  // namespace torchweld
