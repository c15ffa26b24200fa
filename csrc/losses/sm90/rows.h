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
  float* target_logit;                 // (rows,) the target's logit after softcap and temperature
  float* reference;                    // (rows,) the reference exponent; inf for an ignored row
};

// Computes the logit of each row's target in fp32, and the row's reference exponent from it.
void launch_target_logits(const ExponentialRows& p, cudaStream_t stream);

// The sums that the matmul has stored for a range of tiles (losses/sm90/exponentials.h).
struct TileSums {
  const float *reference, *sum, *moment;  // (tiles, rows); moment may be nullptr
  int64_t tiles;
  int tile_columns;
  bool first, last;  // whether the range has the first tile of the logits, and the last
};

struct ExponentialResults {
  float *loss, *lse;  // (rows,); 0 for an ignored row
  float* entropy;     // (rows,), or nullptr
  // (rows,) running results over the tiles so far: the largest reference exponent, and the sum and
  // the moment relative to it.
  float *row_reference, *row_sum, *row_moment;
  // The exponentials (rows, n) in bf16, or nullptr. The kernels change y so that factor * y is the
  // gradient of the logits.
  void* y;
  int64_t y_row_stride;
  int64_t first_column;  // the column of the logits that y's first column belongs to
  float* factor;         // (rows,)
  // (rows,): the share of the gradient's factor that the target's term has; nullptr: 1.
  const float* target_share = nullptr;
};

// Adds the sums of a range of tiles to the running results of the rows. With the last range, the
// kernels also compute the loss, the lse and the entropy, and finish y and factor.
void launch_exponential_rows(const ExponentialRows& p, const TileSums& tiles,
                             const ExponentialResults& results, cudaStream_t stream);

// Computes factor, row_sum and each row's exponent row_reference from the lse. A backward that
// computes y again calls this before its matmul.
void launch_gradient_factors(const ExponentialRows& p, const ExponentialResults& results,
                             cudaStream_t stream);

// Writes y at the target of each row whose target is among y's columns.
void launch_gradient_targets(const ExponentialRows& p, const ExponentialResults& results,
                             cudaStream_t stream);

// Computes to = factor * scale * from for each row. A row whose factor is 0 becomes 0 even if
// `from` has inf or NaN there.
struct ScaledRows {
  int64_t rows, columns;
  const void* from;
  int64_t from_row_stride;
  void* to;
  int64_t to_row_stride;
  const float* factor;   // (rows,)
  const float* scale;    // (rows,)
  int64_t scale_stride;  // 0 if all rows share one scale
};
void launch_scale_rows(const ScaledRows& p, cudaStream_t stream);

}  // namespace torchweld
