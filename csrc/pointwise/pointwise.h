// The parameters of the kernels that compute the gradients of activations and gates. These kernels
// also sum their results over the rows. The sums are the gradient of the bias.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/activation_kind.h"
#include "core/dtype.h"

namespace torchweld {

// dz = dy * activation'(z), and dbias is the sum of dz over the rows. All matrices are (rows, n)
// with stride 1 along a row.
struct ActivationBackwardParams {
  const void* dy;
  const void* z;    // z, or y for relu; nullptr without an activation
  void* dz;         // nullptr without an activation, because dz is then dy
  void* dbias;      // (n,), or nullptr if not requested
  float* partials;  // column_partials(rows, n) values, or nullptr if dbias is nullptr
  int64_t rows;
  int64_t n;
  int64_t dy_row_stride;
  int64_t z_row_stride;
  int64_t dz_row_stride;
  Activation activation;
  DType dtype;
};

// The kernel computes y[c], the sum of partials[chunk][c] over the chunks. partials is (chunks, n).
struct PartialSumsParams {
  const float* partials;
  void* y;
  int64_t chunks;
  int64_t n;
  DType dtype;
};

// The parameters of the kernel for the gradient of y = gate(left, right). The kernel computes dz
// (rows, 2n) from dy (rows, n) and z (rows, 2n). The halves of z are left and right. dbias (n,)
// receives the sum of the left half of dz over the rows, and dbias_right (n,) receives the sum of
// the right half. If z is interleaved, dbias (2n,) receives the sums of both halves. act (rows, n)
// receives y. act has the strides of dy and may be dy itself. If z is interleaved, act must be
// nullptr.
struct GateBackwardParams {
  const void* dy;
  const void* z;
  void* dz;
  void* act;                  // nullptr if not requested
  void *dbias, *dbias_right;  // nullptr if not requested
  float* partials;            // 2 * column_partials(rows, n) values; nullptr without dbias
  int64_t rows;
  int64_t n;
  int64_t dy_row_stride;
  int64_t z_row_stride;
  int64_t dz_row_stride;
  Gate gate;
  bool interleaved;
  DType dtype;
};

// The launchers. All sizes must be at least 1.
void launch_activation_backward(const ActivationBackwardParams& params, cudaStream_t stream);
void launch_gate_backward(const GateBackwardParams& params, cudaStream_t stream);
void launch_partial_sums(const PartialSumsParams& params, cudaStream_t stream);

}  // namespace torchweld
