// The gradient of attention on Hopper: what the host hands to the kernels.
#pragma once

#include "attention/bwd_args.cuh"
#include "attention/sm90/tensor_map.h"

namespace torchweld {

// g_dq holds query tiles of dQ^T in the fragments of wgmma, g_turns a number for each of them, and
// the lse of a row that sees nothing is -inf.
template <typename Args>
struct BackwardSm90Params {
  TensorMap query, key, value, dout;  // boxes of 64 columns; of a query tile or of a block's keys
  TensorMap dkey, dvalue;             // boxes of 64 columns and keys
  Args args;
};

// The statistics of the rows, which the tile's launch needs (attention/sm90/bwd_rows.cuh).
template <typename T, int kTile, typename Args>
void launch_attention_backward_sm90_rows(const Args& args, cudaStream_t stream);

// In a file for each dtype and tile (csrc/instantiations.py).
template <typename T, int kTile, typename Args>
void launch_attention_backward_sm90_tile(const Args& args, cudaStream_t stream);

// The same of a wide one.
template <typename T, int kTile, typename Args>
void launch_attention_bwd_2cta_tile(const Args& args, cudaStream_t stream);

}  // namespace torchweld
