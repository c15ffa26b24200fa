// The kernel parameters of int4_pack, int4_unpack and int4_repack.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/dtype.h"
#include "int4/layout.h"

namespace torchweld {

struct Int4PackParams {
  const uint8_t* codes;  // (rows, cols); rows are row_stride elements apart
  uint32_t* packed;      // (rows, words), contiguous
  int64_t rows, cols, row_stride;
};

struct Int4UnpackParams {
  const uint32_t* packed;  // (rows, words); rows are row_stride elements apart
  uint8_t* codes;          // (rows, cols), contiguous
  int64_t rows, cols, row_stride;
};

struct Int4Strides {
  int64_t row, column;
};

struct Int4RepackParams {
  const uint32_t* qweight;  // (N, K / 8)
  const void* scale;        // (N, groups)
  const uint32_t* zero;     // (N, ceil(groups / 8))
  uint32_t* packed;
  void* packed_scale;
  uint32_t* packed_zero;
  Int4Shape shape;
  Int4Strides qweight_strides, scale_strides, zero_strides;
  DType dtype;  // the dtype of the scales
};

void launch_int4_pack(const Int4PackParams& params, cudaStream_t stream);
void launch_int4_unpack(const Int4UnpackParams& params, cudaStream_t stream);
void launch_int4_repack(const Int4RepackParams& params, cudaStream_t stream);

}  // namespace torchweld
