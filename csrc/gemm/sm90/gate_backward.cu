// Launches the matmul whose epilogue computes the gradient of a gate.
#include "gemm/sm90/gate_backward.cuh"

namespace torchweld::sm90 {
namespace {

// Returns the tensor map of one matrix. `halves` is 2 for z (M, 2N) and dz (M, 2N), and 1 for act
// (M, N). A box has 16 rows and 64 columns of one half.
TensorMap half_map(const GemmParams& p, const void* data, int64_t halves) {
  constexpr Tile kTile = gate_backward_tile();
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
void launch(const GateBackwardKernelParams& p, cudaStream_t stream) {
  using Config = GateBackwardConfig<kMath>;
  static_assert(sizeof(Shared<Config>) <= Config::kT.shared_bytes());
  Grid grid(int64_t{p.stream_k.workers} * Config::kT.cluster, Tile::kThreads,
            sizeof(Shared<Config>));
  grid.cluster = Config::kT.cluster;
  grid.overlaps = true;
  launch_kernel(gemm_kernel<Config, GateBackwardKernelParams>, grid, stream, p);
}

}  // namespace
}  // namespace torchweld::sm90

namespace torchweld {

void launch_gate_backward_matmul(const GateBackwardMatmulParams& params, cudaStream_t stream) {
  GemmParams gemm = params.gemm;
  gemm.choice = {GemmEngine::kSm90, sm90::kPingPong128x128Cluster2, 1, gemm.k};
  sm90::GateBackwardKernelParams p = {sm90::kernel_params(gemm, stream),
                                      sm90::half_map(gemm, params.z, 2),
                                      sm90::half_map(gemm, params.dz, 2)};
  p.gate = params.gate;
  p.stores_act = params.act != nullptr;
  if (p.stores_act) p.act = sm90::half_map(gemm, params.act, 1);
  gemm.dtype == DType::kFloat16 ? sm90::launch<GemmMath::kFloat16>(p, stream)
                                : sm90::launch<GemmMath::kBFloat16>(p, stream);
  check_launch("gated_mlp_backward");
}

}  // namespace torchweld
