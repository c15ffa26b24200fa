// Launches matmuls with a 4-bit weight.
#include "core/launch.h"
#include "device/dispatch.cuh"
#include "int4/params.h"

namespace torchweld {

void launch_int4_linear(const Int4LinearParams& p, cudaStream_t stream) {
  const bool half = p.gemm.dtype == DType::kFloat16;
  switch (p.choice.engine) {
    case Int4Engine::kDecode:
      launch_int4_decode(p, stream);
      break;
    case Int4Engine::kSmallM:
      half ? launch_int4_small_m_of<__half>(p, stream)
           : launch_int4_small_m_of<__nv_bfloat16>(p, stream);
      break;
    case Int4Engine::kLargeM:
      half ? launch_int4_large_m_of<__half>(p, stream)
           : launch_int4_large_m_of<__nv_bfloat16>(p, stream);
      break;
    default:
      dispatch_dtype(p.gemm.dtype,
                     [&](auto element) { launch_int4_linear_of<decltype(element)>(p, stream); });
      if (p.gemm.choice.splits > 1) launch_gemm_sum(p.gemm, stream);
  }
  check_launch("int4_linear");
}

}  // namespace torchweld
