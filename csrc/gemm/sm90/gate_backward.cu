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

template <GemmMath kMath, class Params>
void launch(const Params& p, cudaStream_t stream) {
  using Config = GateBackwardConfig<kMath>;
  static_assert(sizeof(Shared<Config>) <= Config::kT.shared_bytes());
  Grid grid(int64_t{p.stream_k.workers} * Config::kT.cluster, Tile::kThreads,
            sizeof(Shared<Config>));
  grid.cluster = Config::kT.cluster;
  grid.overlaps = true;
  launch_kernel(gemm_kernel<Config, Params>, grid, stream, p);
}

template <class Params>
void launch_dtype(const Params& p, cudaStream_t stream) {
  p.gemm.dtype == DType::kFloat16 ? launch<GemmMath::kFloat16>(p, stream)
                                  : launch<GemmMath::kBFloat16>(p, stream);
}

}  // namespace
}  // namespace torchweld::sm90

namespace torchweld {

void launch_gate_backward_matmul(const GateBackwardMatmulParams& params, cudaStream_t stream) {
  GemmParams gemm = params.gemm;
  const bool grouped = gemm.groups.dim == Grouped::kRows;
  if (grouped) launch_group_tiles(gemm, gate_backward_tile().group_rows(), stream);
  gemm.choice = {GemmEngine::kSm90, sm90::kPingPong128x128Cluster2, 1, gemm.k};
  sm90::GateBackwardKernelParams p = {sm90::kernel_params(gemm, stream),
                                      sm90::half_map(gemm, params.z, 2),
                                      sm90::half_map(gemm, params.dz, 2)};
  p.gate = params.gate;
  p.stores_act = params.act != nullptr;
  if (p.stores_act) p.act = sm90::half_map(gemm, params.act, 1);
  if (grouped) {
    sm90::launch_dtype(
        sm90::GroupedGateBackwardKernelParams{p, params.weights, params.dz, params.act}, stream);
    check_launch("experts_backward");
  } else {
    sm90::launch_dtype(p, stream);
    check_launch("gated_mlp_backward");
  }
}

}  // namespace torchweld
