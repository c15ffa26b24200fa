// The per-row kernels that run before and after the matmul whose epilogue computes exponentials.
// This header does not use torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/dtype.h"

namespace torchweld {

struct ExponentialRows {
  int64_t rows, n, k;  // x is (rows, k); the logits are (rows, n)
  const void* x;       // (rows, k) bf16
  int64_t x_row_stride;
  const void* weight;  // (n, k) bf16
  int64_t weight_row_stride;
  const void* bias;       // (n,) bf16, or nullptr
  const int64_t* target;  // (rows,)
  int64_t ignore_index;
  float temperature, softcap, z_loss;  // softcap 0 means no softcap
  float label_smoothing;               // if not 0, softcap must be 0
  const float* mean_weight;            // (k,), the mean of the rows of weight, or nullptr
  const float* mean_bias;              // (), the mean of the bias, or nullptr
  float* target_logit;                 // (rows,), the target's logit after softcap and temperature
  float* reference;                    // (rows,), the reference exponent; inf for an ignored row
  float* mean_logit;  // (rows,), the mean of a row's logits; not written if mean_weight is nullptr
};

// Computes the logit of each row's target in fp32. From this logit, computes the row's reference
// exponent. If mean_weight is not nullptr, also computes the mean of each row's logits.
void launch_target_logits(const ExponentialRows& p, cudaStream_t stream);

// The sums that the matmul has stored for a range of tiles. losses/sm90/exponentials.h defines
// these sums.
struct TileSums {
  const float *reference, *sum, *moment;  // (tiles, rows); moment may be nullptr
  int64_t tiles;
  int tile_columns;
  bool first, last;  // `first` (`last`): whether the range has the first (last) tile of the logits
};

struct ExponentialResults {
  float *loss, *lse;  // (rows,); 0 for an ignored row
  float* entropy;     // (rows,), or nullptr
  // (rows,), the running results over all tiles so far. row_reference is the largest reference
  // exponent. row_sum is the sum, and row_moment is the moment, both relative to row_reference.
  float *row_reference, *row_sum, *row_moment;
  // The exponentials (rows, n) in bf16, or nullptr. The kernels modify y so that factor * y is the
  // gradient with respect to the logits.
  void* y;
  int64_t y_row_stride;
  int64_t first_column;  // the column of the logits that is the first column of y
  float* factor;         // (rows,)
  // (rows,). The target's term of the gradient with respect to the scaled logit is
  // -(1 - label_smoothing) * target_share, before the multiplication by dloss. If nullptr,
  // target_share is 1.
  const float* target_share = nullptr;
};

// Adds the sums of a range of tiles to the running results of the rows. If the range has the last
// tile, the kernels also compute the loss, the lse and the entropy, and complete y and factor.
void launch_exponential_rows(const ExponentialRows& p, const TileSums& tiles,
                             const ExponentialResults& results, cudaStream_t stream);

// Computes factor, row_sum and row_reference of each row from the lse. A backward that computes y
// again must call this function before the matmul that computes y.
void launch_gradient_factors(const ExponentialRows& p, const ExponentialResults& results,
                             cudaStream_t stream);

// Sets y at the target of each row, if the target is one of the columns of y.
void launch_gradient_targets(const ExponentialRows& p, const ExponentialResults& results,
                             cudaStream_t stream);

// The parameters of the kernel that computes to = factor * scale * from + row_offset * offset, with
// one factor, scale and row_offset per row, and one offset per column. If the factor of a row is 0,
// the result is 0 even if `from` has inf or NaN in this row.
struct ScaledRows {
  int64_t rows, columns;
  const void* from;
  int64_t from_row_stride;
  bool from_fp32;  // whether `from` is fp32 instead of bf16; `to` is bf16
  void* to;
  int64_t to_row_stride;
  const float* factor;      // (rows,)
  const float* scale;       // (rows,)
  int64_t scale_stride;     // 0 if all rows share one scale
  const float* row_offset;  // (rows,), or nullptr
  const float* offset;      // (columns,), or nullptr if row_offset is nullptr
};
void launch_scale_rows(const ScaledRows& p, cudaStream_t stream);

}  // namespace torchweld
