// The kernels of single rows around the product that ends in exponentials. Torch-free.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/dtype.h"

namespace torchweld {

struct ExponentialRows {
  int64_t rows, n, k;  // n: columns of the logits
  const void* x;       // (rows, k) bf16
  int64_t x_row_stride;
  const void* weight;  // (n, k) bf16
  int64_t weight_row_stride;
  const void* bias;       // (n,) bf16, or nullptr
  const int64_t* target;  // (rows,)
  int64_t ignore_index;
  float temperature, softcap, z_loss;  // softcap 0: none
  float* target_logit;                 // (rows,) after softcap and temperature
  float* reference;                    // (rows,) exponent, inf where a row is ignored
};

// Computes each row's target logit in fp32, and a reference exponent from it.
void launch_target_logits(const ExponentialRows& p, cudaStream_t stream);

// Sums over the tiles of some columns (losses/sm90/params.h).
struct TileSums {
  const float *reference, *sum, *moment;  // (tiles, rows); moment may be nullptr
  int64_t tiles;
  int tile_columns;
  bool first, last;  // columns of the logits
};

struct ExponentialResults {
  float *loss, *lse;  // (rows,); 0 where a row is ignored
  float* entropy;     // (rows,), or nullptr
  // (rows,) of the columns so far: the largest exponent, and sums against it.
  float *row_reference, *row_sum, *row_moment;
  // Exponentials (rows, n) in bf16 of all columns at once, or nullptr. They become what factor
  // times is the gradient of the logits.
  void* y;
  int64_t y_row_stride;
  int64_t first_column;  // of the logits, where y has the n columns from there on
  float* factor;         // (rows,)
  // (rows,): the share of the gradient's factor that the target's term has; nullptr: 1.
  const float* target_share = nullptr;
};

// Adds the sums of tiles to those of the rows; the last ones make the results.
void launch_exponential_rows(const ExponentialRows& p, const TileSums& tiles,
                             const ExponentialResults& results, cudaStream_t stream);

// The last step of launch_exponential_rows for y, which a gradient that computes y anew calls
// alone: factor and row_sum from the lse. row_reference holds each row's exponent.
void launch_gradient_factors(const ExponentialRows& p, const ExponentialResults& results,
                             cudaStream_t stream);

// Puts the target's term into y, for targets among its columns.
void launch_gradient_targets(const ExponentialRows& p, const ExponentialResults& results,
                             cudaStream_t stream);

// to = factor * scale * from, row by row; zeros where the factor is 0, whatever from has there.
struct ScaledRows {
  int64_t rows, columns;
  const void* from;
  int64_t from_row_stride;
  void* to;
  int64_t to_row_stride;
  const float* factor;   // (rows,)
  const float* scale;    // (rows,)
  int64_t scale_stride;  // 0: one value for all rows
};
void launch_scale_rows(const ScaledRows& p, cudaStream_t stream);

}  // namespace torchweld
