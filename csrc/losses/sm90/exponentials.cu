// Launches the matmul whose epilogue computes exponentials. The operands are bf16 and K-major.
#include <type_traits>

#include "losses/sm90/epilogue.cuh"

namespace torchweld {
namespace {

template <int kTile, bool kCapped, bool kMoment>
void launch_tile(const Sm90ExponentialsParams<kCapped, kMoment>& p, cudaStream_t stream) {
  constexpr Sm90Tile kT = kSm90Tiles[kTile];
  using Config = Sm90Config<GemmMath::kBFloat16, kTile, true, true, false>;
  Grid grid(int64_t{p.stream_k.workers} * kT.cluster, Sm90Tile::kThreads,
            sizeof(Sm90Shared<Config>));
  grid.cluster = kT.cluster;
  grid.overlaps = true;
  launch_kernel(sm90_gemm_kernel<Config, Sm90ExponentialsParams<kCapped, kMoment>>, grid, stream,
                p);
}

}  // namespace

void launch_sm90_exponentials(const GemmParams& p, const ExponentialsParams& exponentials,
                              cudaStream_t stream) {
  const auto launch = [&](auto capped, auto moment) {
    const Sm90ExponentialsParams<capped.value, moment.value> params = {sm90_params(p, stream),
                                                                       exponentials};
    if (p.choice.tile == kPingPong128x128Cluster2) {
      return launch_tile<kPingPong128x128Cluster2>(params, stream);
    }
    launch_tile<kCooperative128x256Cluster2>(params, stream);
  };
  const auto with_moment = [&](auto moment) {
    if (exponentials.softcap > 0) return launch(std::true_type(), moment);
    launch(std::false_type(), moment);
  };
  if (exponentials.tile_moment != nullptr) return with_moment(std::true_type());
  with_moment(std::false_type());
}

}  // namespace torchweld
