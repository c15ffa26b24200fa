// Launches matmuls with a 4-bit weight and few tokens.
#include "int4/decode/kernel.cuh"

namespace torchweld {

void launch_int4_decode(const Int4LinearParams& p, cudaStream_t stream) {
  if (p.gemm.dtype == DType::kFloat16) {
    launch_int4_decode_of<__half>(p, stream);
  } else {
    launch_int4_decode_of<__nv_bfloat16>(p, stream);
  }
  check_launch("int4_linear");
}

}  // namespace torchweld
