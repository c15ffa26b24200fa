// The bias of attention: what is added to the scaled score of a query row and a key. This is for
// host and device code.
#pragma once

#include <cstdint>

#include "core/macros.h"

namespace torchweld {

// A tensor (batch, nheads, seqlen_q, seqlen_k) in the dtype of query, with rows as those of
// AttentionTensor. The stride of a dimension that is broadcast is 0.
struct AttentionBias {
  const void* data;  // null if no bias is given
  int64_t batch_stride;
  int64_t head_stride;
  int64_t row_stride;

  TW_HOST_DEVICE bool given() const { return data != nullptr; }
  // Whether all query rows have the same bias. The kernels then read this row from global memory.
  TW_HOST_DEVICE bool has_one_row() const { return row_stride == 0; }
  // Whether all sequences have the same bias. The kernels then process the sequences of a head at
  // the same time, so that the bias stays in the L2 cache.
  TW_HOST_DEVICE bool is_shared() const { return given() && batch_stride == 0; }

  // Returns the address of a row. T is the type of query's elements.
  template <typename T>
  TW_HOST_DEVICE const T* row(int64_t batch, int64_t head, int64_t row) const {
    return static_cast<const T*>(data) + batch * batch_stride + head * head_stride +
           row * row_stride;
  }
};

}  // namespace torchweld
