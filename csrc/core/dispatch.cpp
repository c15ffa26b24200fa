#include "core/dispatch.h"

namespace torchweld {

void no_cuda_kernel(const c10::OperatorHandle& op, torch::jit::Stack*) {
#ifdef TORCHWELD_CUDA
  const char* why = "this version has no CUDA kernel for it yet; use the torch ops it replaces";
#else
  const char* why = "this build is CPU-only; reinstall torchweld where nvcc is found";
#endif
  TORCH_CHECK_NOT_IMPLEMENTED(false, op.schema().name(), ": the tensors are on a CUDA device, but ",
                              why);
}

}  // namespace torchweld
