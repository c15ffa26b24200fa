// What the host hands to the product that ends in exponentials. Torch-free.
#pragma once

#include "gemm/sm90/launch.h"
#include "losses/sm90/exponentials.h"

namespace torchweld {

// kCapped: softcap is given. kMoment: tile_moment is asked for.
template <bool kCapped, bool kMoment>
struct Sm90ExponentialsParams : Sm90Params {
  ExponentialsParams exponentials;
};

}  // namespace torchweld
