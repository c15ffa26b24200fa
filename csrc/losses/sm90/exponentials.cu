// Launches the matmul whose epilogue computes exponentials. The operands are bf16 and K-major.
#include <type_traits>

#include "losses/sm90/epilogue.cuh"

namespace torchweld::sm90 {
namespace {

template <int kTile, bool kCapped, bool kMoment>
void launch_exponentials_tile(const ExponentialsKernelParams<kCapped, kMoment>& p,
                              cudaStream_t stream) {
  constexpr Tile kT = kTiles[kTile];
  using Config = KernelConfig<GemmMath::kBFloat16, kTile, true, true, false>;
  Grid grid(int64_t{p.stream_k.workers} * kT.cluster, Tile::kThreads, sizeof(Shared<Config>));
  grid.cluster = kT.cluster;
  grid.overlaps = true;
  launch_kernel(gemm_kernel<Config, ExponentialsKernelParams<kCapped, kMoment>>, grid, stream, p);
}

}  // namespace
}  // namespace torchweld::sm90

namespace torchweld {

void launch_exponentials_matmul(const GemmParams& p, const ExponentialsParams& exponentials,
                                cudaStream_t stream) {
  const auto launch = [&](auto capped, auto moment) {
    const sm90::ExponentialsKernelParams<capped.value, moment.value> params = {
        sm90::kernel_params(p, stream), exponentials};
    if (p.choice.tile == sm90::kPingPong128x128Cluster2) {
      return sm90::launch_exponentials_tile<sm90::kPingPong128x128Cluster2>(params, stream);
    }
    sm90::launch_exponentials_tile<sm90::kCooperative128x256Cluster2>(params, stream);
  };
  const auto with_moment = [&](auto moment) {
    if (exponentials.softcap > 0) return launch(std::true_type(), moment);
    launch(std::false_type(), moment);
  };
  if (exponentials.tile_moment != nullptr) return with_moment(std::true_type());
  with_moment(std::false_type());
}

}  // namespace torchweld
