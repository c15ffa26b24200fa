// Attention backward on Hopper: the arguments that the host passes to the kernels.
#pragma once

#include "attention/bwd_args.cuh"
#include "attention/sm90/tensor_map.h"

namespace torchweld {

// g_dq has dQ^T of each query tile as wgmma accumulates it, g_dq_semaphore a counter per tile and
// CTA of a cluster. g_lse is -inf for a row that sees no key.
template <typename Args>
struct BackwardSm90Params {
  TensorMap query, key, value, dout;  // boxes of 64 columns; a query tile's rows, a CTA's keys
  TensorMap dkey, dvalue;             // boxes of 64 columns and 64 keys
  Args args;
};

// `keys`: keys of a CTA.
template <typename Config>
typename Config::Params backward_sm90_params(const typename Config::Args& args, int keys) {
  const AttentionBackwardParams& a = args.params;
  const AttentionSizes& sizes = a.sizes;
  const auto map = [&](const AttentionTensor& t, int64_t heads, int64_t rows, int64_t columns,
                       int box_rows) {
    return attention_tensor_map("attention_backward", a.dtype, t, sizes.batch, heads, rows, columns,
                                box_rows);
  };
  const auto gradient_map = [&](void* data, int64_t columns) {
    const int64_t head = sizes.seqlen_k * columns;
    return map({data, sizes.nheads_kv * head, head, columns}, sizes.nheads_kv, sizes.seqlen_k,
               columns, 64);
  };
  return {map(a.query, sizes.nheads, sizes.seqlen_q, sizes.head_dim, Config::kRows),
          map(a.key, sizes.nheads_kv, sizes.seqlen_k, sizes.head_dim, keys),
          map(a.value, sizes.nheads_kv, sizes.seqlen_k, sizes.head_dim_v, keys),
          map(a.dout, sizes.nheads, sizes.seqlen_q, sizes.head_dim_v, Config::kRows),
          gradient_map(a.dkey, sizes.head_dim),
          gradient_map(a.dvalue, sizes.head_dim_v),
          args};
}

// csrc/instantiations.py generates a file per dtype and tile.

// lse and delta of the query rows, before the tile's kernel (attention/sm90/bwd_preprocess.cuh).
template <typename T, int kTile, typename Args>
void launch_attention_backward_sm90_preprocess(const Args& args, cudaStream_t stream);

// Head dims up to 128 (attention/sm90/bwd_kernel.cuh).
template <typename T, int kTile, typename Args>
void launch_attention_backward_sm90_tile(const Args& args, cudaStream_t stream);

// Head dims of 129 to 256 (attention/sm90/bwd_2cta_kernel.cuh).
template <typename T, int kTile, typename Args>
void launch_attention_backward_2cta_tile(const Args& args, cudaStream_t stream);

}  // namespace torchweld
