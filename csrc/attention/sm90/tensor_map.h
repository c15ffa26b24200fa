// Makes the TMA tensor maps of attention's operands and gradients. This is host code.
#pragma once

#include "attention/params.h"
#include "device/sm90/tensor_map.h"

namespace torchweld {

// A TMA box has 64 16-bit columns (a swizzle row of 128 bytes) and `box_rows` rows of one head.
inline TensorMap attention_tensor_map(const char* op, DType dtype, const AttentionTensor& t,
                                      int64_t batch, int64_t heads, int64_t rows, int64_t columns,
                                      int box_rows) {
  return make_tensor_map(op, {t.data,
                              2,
                              {columns, rows, heads, batch},
                              {1, t.row_stride, t.head_stride, t.batch_stride},
                              {AttentionSm90Tile::kBoxColumns, box_rows, 1, 1},
                              dtype == DType::kBFloat16});
}

}  // namespace torchweld
