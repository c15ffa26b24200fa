// The launcher of the products with a 4-bit weight.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/launch.h"
#include "ops/int4_linear/int4_linear.h"

namespace torchweld {
namespace {

__global__ void target_probe_kernel() {}

}  // namespace

// NOTE: a chip newer than the code that was compiled for it runs the PTX of an older one, which has
// no clusters.
bool int4_has_clusters() {
  if (!device_has_clusters()) return false;
  cudaFuncAttributes attributes = {};
  if (cudaFuncGetAttributes(&attributes, target_probe_kernel) != cudaSuccess) {
    (void)cudaGetLastError();  // the launch tells what is wrong
    return false;
  }
  return attributes.ptxVersion >= 90;
}

void launch_int4_linear(const Int4LinearParams& p, cudaStream_t stream) {
  switch (p.gemm.dtype) {
    case DType::kFloat16:
      launch_int4_linear_of<__half>(p, stream);
      break;
    case DType::kBFloat16:
      launch_int4_linear_of<__nv_bfloat16>(p, stream);
      break;
    case DType::kFloat32:
      launch_int4_linear_of<float>(p, stream);
      break;
  }
  if (p.gemm.choice.splits > 1) launch_gemm_sum(p.gemm, stream);
  check_launch("int4_linear");
}

}  // namespace torchweld
