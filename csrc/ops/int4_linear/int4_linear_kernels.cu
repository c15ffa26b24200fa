// The launcher of the products with a 4-bit weight.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/launch.h"
#include "ops/int4_linear/int4_linear.h"

namespace torchweld {

void launch_int4_linear(const Int4LinearParams& p, cudaStream_t stream) {
  if (p.choice.decodes()) return launch_int4_decode(p, stream);
  if (p.choice.is_wide()) {
    p.gemm.dtype == DType::kFloat16 ? launch_int4_wide_of<__half>(p, stream)
                                    : launch_int4_wide_of<__nv_bfloat16>(p, stream);
    return check_launch("int4_linear");
  }
  if (p.choice.is_deep()) {
    p.gemm.dtype == DType::kFloat16 ? launch_int4_deep_of<__half>(p, stream)
                                    : launch_int4_deep_of<__nv_bfloat16>(p, stream);
    return check_launch("int4_linear");
  }
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
