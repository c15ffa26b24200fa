// Launches the matmul whose epilogue computes the gradient of a gate.
#include "gemm/sm90/gate_backward.cuh"

namespace torchweld {
namespace {

// Returns the tensor map of one matrix. `halves` is 2 for z (M, 2N) and dz (M, 2N), and 1 for act
// (M, N). A box has 16 rows and 64 columns of one half.
TensorMap half_map(const GemmParams& p, const void* data, int64_t halves) {
  constexpr Sm90Tile kTile = gate_backward_tile();
  constexpr int kElemBytes = 2;
  const int64_t harmless = 16;  // the stride of a dim with one element has no effect
  const TensorBox box = {data,
                         kElemBytes,
                         {p.n, p.m, halves, 1},
                         {1, halves * p.n, halves == 1 ? harmless : p.n, harmless},
                         {kTile.box_columns(kElemBytes), 16, 1, 1},
                         p.dtype == DType::kBFloat16};
  return make_tensor_map("matmul", box);
}

template <GemmMath kMath>
void launch(const Sm90GateBackwardParams& p, cudaStream_t stream) {
  using Config = GateBackwardConfig<kMath>;
  static_assert(sizeof(Sm90Shared<Config>) <= Config::kT.shared_bytes());
  Grid grid(int64_t{p.stream_k.workers} * Config::kT.cluster, Sm90Tile::kThreads,
            sizeof(Sm90Shared<Config>));
  grid.cluster = Config::kT.cluster;
  grid.overlaps = true;
  launch_kernel(sm90_gemm_kernel<Config, Sm90GateBackwardParams>, grid, stream, p);
}

}  // namespace

void launch_gate_backward_matmul(const GateBackwardMatmulParams& params, cudaStream_t stream) {
  GemmParams gemm = params.gemm;
  gemm.choice = {GemmEngine::kSm90, kPingPong128x128Cluster2, 1, gemm.k};
  Sm90GateBackwardParams p = {sm90_params(gemm, stream), half_map(gemm, params.z, 2),
                              half_map(gemm, params.dz, 2)};
  p.gate = params.gate;
  p.stores_act = params.act != nullptr;
  if (p.stores_act) p.act = half_map(gemm, params.act, 1);
  gemm.dtype == DType::kFloat16 ? launch<GemmMath::kFloat16>(p, stream)
                                : launch<GemmMath::kBFloat16>(p, stream);
  check_launch("gated_mlp_backward");
}

}  // namespace torchweld
