// The kernels of causal_softmax for float16 and bfloat16.
#include "ops/causal_softmax/causal_softmax_launch.cuh"

namespace torchweld {

void launch_causal_softmax_16bit(const SoftmaxParams& params, const CausalMask& mask,
                                 const ZeroCounter& counter, cudaStream_t stream) {
  if (params.dtype == DType::kFloat16) {
    launch_causal_softmax_of<__half>(params, mask, counter, stream);
  } else {
    launch_causal_softmax_of<__nv_bfloat16>(params, mask, counter, stream);
  }
}

}  // namespace torchweld
