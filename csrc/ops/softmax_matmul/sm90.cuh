// The forward of softmax_matmul on Hopper, for 16-bit dtypes. It uses attention's kernel
// (attention/sm90/fwd_kernel.cuh), but TMA loads scores instead of keys, and no product computes
// the scores. A TMA box holds the scores of a tile's query rows for 64 keys. ldmatrix then loads
// the scores into registers. A box must start on a 16-byte boundary. If the first live key of a
// sequence is not on such a boundary, the loop starts up to 7 keys earlier and masks these keys.
#pragma once

#include "attention/sm90/fwd_kernel.cuh"
#include "ops/softmax_matmul/softmax_matmul.h"

namespace torchweld {

template <typename T_, int kDimV_, bool kMasked>
struct SoftmaxMatmulSm90Config : AttentionVariant<kMasked> {
  using T = T_;
  static constexpr bool kReadsScores = true;
  // Every work tile reads all values of its head, so L2 bandwidth limits the kernel. Therefore a
  // work tile has many rows.
  static constexpr int kDim = 0, kDimV = kDimV_, kWarpgroups = kDimV > 128 ? 2 : 3;
  // NOTE: wide accumulators or a general mask leave no registers for tiles of more than 64 keys.
  static constexpr int kKeys = kDimV > 64 || kMasked ? 64 : 128;
  static constexpr int kRows = 64 * kWarpgroups, kThreads = 128 * (kWarpgroups + 1),
                       kQueryStages = 1, kWarpRows = 16, kCtasPerSm = 1;
  static constexpr int kBoxes = AttentionSm90Tile::boxes(kKeys),
                       kBoxesV = AttentionSm90Tile::boxes(kDimV);
  static constexpr int kScoreBoxBytes = kRows * kSwizzleRowBytes,
                       kKeyBoxBytes = kKeys * kSwizzleRowBytes,
                       kQueryBoxBytes = 64 * kSwizzleRowBytes;
  static constexpr int kKeyBytes = kBoxes * kScoreBoxBytes, kValueBytes = kBoxesV * kKeyBoxBytes,
                       kQueryOutBytes = kBoxesV * kQueryBoxBytes;
  static constexpr int kStages = (kSoftmaxMatmulSm90Bytes - AttentionSm90Tile::extra_bytes(kRows) -
                                  kWarpgroups * kQueryOutBytes) /
                                 (kKeyBytes + kValueBytes);
  static constexpr bool kLazyRescale = kDimV > 128, kCapped = kMasked, kSmallScores = false,
                        kDropout = false, kBias = false, kAlibi = false;
  using Block =
      std::conditional_t<kMasked, MaskedAttentionBlock<kRows, kWarpRows, 8>, AttentionBlock>;
  using Params = AttentionSm90Params<kMasked>;
};

template <typename T, int kDimV, bool kMasked>
void launch_softmax_matmul_sm90_to(const SoftmaxMatmulParams& params, cudaStream_t stream) {
  using Config = SoftmaxMatmulSm90Config<T, kDimV, kMasked>;
  static_assert(sizeof(AttentionSm90Shared<Config>) <= kSoftmaxMatmulSm90Bytes);
  const SoftmaxMatmulProblem& problem = params.problem;
  const auto map = [&](const HeadsOperand& t, int64_t rows, int64_t columns, int box_rows) {
    return attention_tensor_map("softmax_matmul", problem.dtype,
                                {t.data, t.batch_stride, t.head_stride, t.row_stride},
                                problem.batch, problem.nheads, rows, columns, box_rows);
  };
  AttentionParams a{};
  const int64_t head_elems = problem.mask.seqlen_q * problem.head_dim_v;
  a.out = {params.out, problem.nheads * head_elems, head_elems, problem.head_dim_v};
  a.lse = params.lse;
  a.sizes = {problem.batch,         problem.nheads, problem.nheads,    problem.mask.seqlen_q,
             problem.mask.seqlen_k, Config::kDim,   problem.head_dim_v};
  a.scale = problem.scale;
  a.mask = problem.mask;
  a.dtype = problem.dtype;
  a.counters = params.counters;
  if (is_batch_invariant()) a.key_grid = Config::kKeys;
  const TensorMap scores =
      map(params.scores, problem.mask.seqlen_q, problem.mask.seqlen_k, Config::kRows);
  const typename Config::Params p = {
      scores,
      scores,
      map(params.value, problem.mask.seqlen_k, problem.head_dim_v, Config::kKeys),
      a,
      Config::scale(a),
      AttentionSm90Schedule(a, Config::kRows)};
  launch_attention_sm90_kernel<Config>(p, stream);
}

template <typename T, bool kMasked>
void launch_softmax_matmul_sm90(const SoftmaxMatmulParams& params, cudaStream_t stream) {
  const int64_t columns = params.problem.head_dim_v;
  if (columns <= 64) return launch_softmax_matmul_sm90_to<T, 64, kMasked>(params, stream);
  if (columns <= 128) return launch_softmax_matmul_sm90_to<T, 128, kMasked>(params, stream);
  launch_softmax_matmul_sm90_to<T, 256, kMasked>(params, stream);
}

}  // namespace torchweld
