// The engines of cross_entropy: a pass over the rows of logits that gives statistics, the gradient,
// or both.
#pragma once

#include "losses/loss.h"

namespace torchweld::cross_entropy_op {

struct LogitInputs {
  Tensor logits;  // (..., N)
  Tensor target;  // (...), as the caller gave it
  LossOptions options;
  Tensor targets = target_of_rows(target, options);  // (rows,) int64
};

// Vectors over all rows are in the dtype of sums. The rows' loss is undefined where their lse is
// given. dloss may have stride 0. dlogits is contiguous, and undefined where no gradient is
// wanted. A row that is ignored keeps its statistics, and its dlogits are 0.
using Engine = void (*)(const char* op, const LogitInputs& in, const LossRows& rows,
                        const Tensor& dloss, const Tensor& dlogits);

void cross_entropy_rows_cpu(const char* op, const LogitInputs& in, const LossRows& rows,
                            const Tensor& dloss, const Tensor& dlogits);
#ifdef TORCHWELD_CUDA
void cross_entropy_rows_cuda(const char* op, const LogitInputs& in, const LossRows& rows,
                             const Tensor& dloss, const Tensor& dlogits);
#endif

}  // namespace torchweld::cross_entropy_op
