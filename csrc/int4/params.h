// The kernel parameters of matmuls with a repacked 4-bit weight.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "gemm/gemm.h"
#include "int4/config.h"

namespace torchweld {

// A repacked weight. Its arrays are contiguous and 16-byte aligned.
struct Int4Weight {
  Int4Shape shape;
  const uint32_t* packed;
  const void* scale;
  const uint32_t* zero;
};

// The parameters of a product. gemm.a is x: K-major, with rows that start on 16-byte boundaries.
// `gemm` also holds y and the bias. If a second kernel adds the partials of the splits, `gemm` also
// holds the workspace. `weight` replaces operand b of `gemm`.
struct Int4LinearParams {
  GemmParams gemm;
  Int4Weight weight;
  Int4Choice choice;
  int sms;        // number of SMs of the device
  bool clusters;  // whether the device supports thread-block clusters
};

// The operands of the decode and small-M kernels. x_row_bytes is in bytes, and y_row_stride is in
// elements.
struct Int4Operands {
  const char *x, *words, *scale, *zero;
  const void* bias;
  void* y;
  int64_t x_row_bytes, y_row_stride;

  Int4Operands(const Int4LinearParams& p, int elem_size)
      : x(static_cast<const char*>(p.gemm.a.data)),
        words(reinterpret_cast<const char*>(p.weight.packed)),
        scale(static_cast<const char*>(p.weight.scale)),
        zero(reinterpret_cast<const char*>(p.weight.zero)),
        bias(p.gemm.epilogue.bias),
        y(p.gemm.y),
        x_row_bytes(p.gemm.a.row_stride * elem_size),
        y_row_stride(p.gemm.y_row_stride) {}
};

struct Int4DequantiseParams {
  Int4Weight weight;
  void* dense;  // (N, K), contiguous, 16-byte aligned
  DType dtype;  // the dtype of the scales and of dense
};

// Launches the kernel of `choice`. choice.engine must not be kDense. All sizes must be at least 1.
void launch_int4_linear(const Int4LinearParams& params, cudaStream_t stream);
void launch_int4_dequantise(const Int4DequantiseParams& params, cudaStream_t stream);

// Launches the decode kernel. choice.engine must be kDecode.
void launch_int4_decode(const Int4LinearParams& params, cudaStream_t stream);

// Launches the mma.sync kernel. csrc/instantiations.py generates one file with the instances of
// this function, and one file for each of the next two functions.
template <typename T>
void launch_int4_linear_of(const Int4LinearParams& params, cudaStream_t stream);
// Launches the large-M kernel. choice.engine must be kLargeM.
template <typename T>
void launch_int4_large_m_of(const Int4LinearParams& params, cudaStream_t stream);
// Launches the small-M kernel. choice.engine must be kSmallM.
template <typename T>
void launch_int4_small_m_of(const Int4LinearParams& params, cudaStream_t stream);

}  // namespace torchweld
