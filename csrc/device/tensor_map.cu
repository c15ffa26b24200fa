// Makes tensor maps with the CUDA driver. The first call looks up the function of the driver.
#include "device/sm90/tensor_map.h"

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

#include "core/observe.h"

namespace torchweld {
namespace {

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                            const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                            CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                            CUtensorMapFloatOOBfill);

// NOTE: the library does not link libcuda, because the library must load on machines without a
// driver.
Encode encoder() {
  static const Encode found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    constexpr unsigned kCuda12 = 12000;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                               kCuda12, cudaEnableDefault, &result);
    const bool known = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
    return known ? reinterpret_cast<Encode>(function) : nullptr;
  }();
  return found;
}

// NOTE: a function of the driver needs a CUDA context that is current in the calling thread. The
// first CUDA runtime call of a thread makes a context current. An autograd thread may have made no
// such call, if all its memory came from torch's cache.
bool make_context_current() {
  int device;
  return cudaGetDevice(&device) == cudaSuccess && cudaSetDevice(device) == cudaSuccess;
}

std::string list(const int64_t (&values)[4]) {
  std::string text;
  for (const int64_t value : values) text += (text.empty() ? "(" : ", ") + std::to_string(value);
  return text + ")";
}

}  // namespace

TensorMap make_tensor_map(const char* op, const TensorBox& t) {
  TensorMap map = {};
  if (is_dry_run()) return map;
  cuuint64_t sizes[4], strides[3];
  cuuint32_t box[4], steps[4];
  for (int i = 0; i < 4; ++i) {
    sizes[i] = static_cast<cuuint64_t>(t.sizes[i]);
    box[i] = static_cast<cuuint32_t>(t.box[i]);
    steps[i] = 1;
    if (i > 0) strides[i - 1] = static_cast<cuuint64_t>(t.strides[i] * t.elem_size);
  }
  const CUtensorMapDataType type = t.tf32             ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32
                                   : t.elem_size == 4 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                   : t.bfloat16       ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                      : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const CUtensorMapSwizzle swizzle =
      t.swizzle == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  const Encode encode = encoder();
  const auto encode_map = [&] {
    return encode(&map, type, 4, const_cast<void*>(t.data), sizes, strides, box, steps,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult result = encode == nullptr ? CUDA_ERROR_NOT_SUPPORTED : encode_map();
  if (result == CUDA_ERROR_INVALID_CONTEXT && make_context_current()) result = encode_map();
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error(std::string("torchweld::") + op +
                             ": the driver makes no tensor map of sizes " + list(t.sizes) +
                             ", strides " + list(t.strides) + " (error " +
                             std::to_string(static_cast<int>(result)) + ")");
  }
  return map;
}

}  // namespace torchweld
