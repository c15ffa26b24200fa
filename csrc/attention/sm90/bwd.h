// The parameters and the launchers of the kernels of attention's backward on Hopper.
#pragma once

#include "attention/bwd_args.cuh"
#include "attention/sm90/tensor_map.h"

namespace torchweld {

// The tensor maps that only the kernels for a bias have: the bias, with boxes of a query tile's
// rows and 64 keys, and its gradient in all sequences and heads, params.ds.
template <bool kIsBiased>
struct BackwardBiasMaps {};
template <>
struct BackwardBiasMaps<true> {
  TensorMap bias, ds;
};

// The parameters of a kernel. args.g_dq holds dQ^T of each query tile in the order of wgmma's
// accumulators. args.g_dq_semaphore has one counter per query tile and CTA rank. args.g_lse is -inf
// for a row that sees no key.
template <typename Args>
struct BackwardSm90Params {
  // Tensor maps with boxes of 64 columns. A box of query or dout has the rows of a query tile. A
  // box of key or value has the keys of a CTA.
  TensorMap query, key, value, dout;
  TensorMap dkey, dvalue;  // tensor maps with boxes of 64 columns and 64 keys
  TensorMap dquery;        // a tensor map with boxes of 64 columns and the rows of a slice of dQ
  Args args;
  BackwardBiasMaps<kIsBiased<Args>> of_bias{};
};

// Makes the parameters of a kernel.
template <typename Config>
typename Config::Params backward_sm90_params(const typename Config::Args& args) {
  const AttentionBackwardParams& a = args.params;
  const AttentionSizes& sizes = a.sizes;
  const auto map = [&](const AttentionTensor& t, int64_t heads, int64_t rows, int64_t columns,
                       int box_rows) {
    return attention_tensor_map("attention_backward", a.dtype, t, sizes.batch, heads, rows, columns,
                                box_rows);
  };
  const auto gradient_map = [&](const AttentionOutput& t, int64_t heads, int64_t rows,
                                int64_t columns, int box_rows) {
    return map({t.data, t.batch_stride, t.head_stride, t.row_stride}, heads, rows, columns,
               box_rows);
  };
  typename Config::Params p = {
      map(a.query, sizes.nheads, sizes.seqlen_q, sizes.head_dim, Config::kRows),
      map(a.key, sizes.nheads_kv, sizes.seqlen_k, sizes.head_dim, Config::kCtaKeys),
      map(a.value, sizes.nheads_kv, sizes.seqlen_k, sizes.head_dim_v, Config::kCtaKeys),
      map(a.dout, sizes.nheads, sizes.seqlen_q, sizes.head_dim_v, Config::kRows),
      gradient_map(a.dkey, sizes.nheads_kv, sizes.seqlen_k, sizes.head_dim, 64),
      gradient_map(a.dvalue, sizes.nheads_kv, sizes.seqlen_k, sizes.head_dim_v, 64),
      gradient_map(a.dquery, sizes.nheads, sizes.seqlen_q, sizes.head_dim, Config::kDqRows),
      args};
  if constexpr (Config::kBias) {
    const AttentionBias& bias = a.mask.bias;
    p.of_bias.bias = map({bias.data, bias.batch_stride, bias.head_stride, bias.row_stride},
                         sizes.nheads, sizes.seqlen_q, sizes.seqlen_k, Config::kRows);
    if (a.ds.data) {
      p.of_bias.ds =
          gradient_map(a.ds, sizes.nheads, sizes.seqlen_q, sizes.seqlen_k, Config::kRows);
    }
  }
  return p;
}

// csrc/instantiations.py generates the files that instantiate these templates. The 2-CTA kernel has
// a file of its own.

// Launches the kernel that computes lse and delta of the query rows
// (attention/sm90/bwd_preprocess.cuh). This kernel must run before the kernel that computes the
// gradients.
template <typename T, int kTile, typename Args>
void launch_attention_backward_sm90_preprocess(const Args& args, cudaStream_t stream);

// Launches the kernel that computes the gradients (attention/sm90/bwd_kernel.cuh), and the kernels
// that finish them (attention/sm90/bwd_postprocess.cuh).
template <typename T, int kTile, typename Args>
void launch_attention_backward_sm90_tile(const Args& args, cudaStream_t stream);

}  // namespace torchweld
