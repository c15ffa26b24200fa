// The launcher of causal_softmax, and its kernels for float32.
#include "ops/causal_softmax/causal_softmax_launch.cuh"

namespace torchweld {

void launch_causal_softmax(const SoftmaxParams& params, const CausalMask& mask,
                           const ZeroCounter& counter, cudaStream_t stream) {
  if (params.dtype == DType::kFloat32) {
    launch_causal_softmax_of<float>(params, mask, counter, stream);
  } else {
    launch_causal_softmax_16bit(params, mask, counter, stream);
  }
  check_launch("causal_softmax");
}

}  // namespace torchweld
