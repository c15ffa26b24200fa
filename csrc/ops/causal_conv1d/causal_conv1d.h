// The host interface of the CUDA kernels of causal_conv1d and of its gradients.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/dtype.h"

namespace torchweld {

// A matrix of channels for each position. The stride of the channels is 1.
template <typename Pointer>
struct ConvRows {
  Pointer base;
  int64_t batch_stride, row_stride;
};

// The values at the positions in front of the sequence (batch, channels, width - 1), any strides.
template <typename Pointer>
struct ConvState {
  Pointer base;  // nullptr if not given
  int64_t batch_stride, channel_stride, position_stride;
};

struct CausalConvParams {
  ConvRows<const void*> x;
  const void* weight;  // (channels, width) contiguous
  const void* bias;    // (channels,) contiguous, or nullptr
  ConvState<const void*> state;
  const int32_t* key_start;  // (batch, seqlen) contiguous, or nullptr
  int64_t batch, seqlen, channels;
  int width;
  bool silu;
  DType dtype;
};

struct CausalConvBackwardParams {
  CausalConvParams in;
  ConvRows<const void*> dy;
  void* dx;                 // (batch, seqlen, channels) contiguous, or nullptr if not requested
  void* dweight;            // (channels, width) contiguous, or nullptr
  void* dbias;              // (channels,), or nullptr
  ConvState<void*> dstate;  // the base is nullptr if not requested
  float* partials;          // causal_conv_partials() values, if dweight or dbias is requested
};

// The number of fp32 values of workspace that the sums for dweight and dbias need on the current
// device.
int64_t causal_conv_partials(const CausalConvParams& params);

// y is (batch, seqlen, channels) contiguous. All sizes must be at least 1.
void launch_causal_conv(const CausalConvParams& params, void* y, cudaStream_t stream);
void launch_causal_conv_backward(const CausalConvBackwardParams& params, cudaStream_t stream);

}  // namespace torchweld
