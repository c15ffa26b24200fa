// The interface of the CPU and CUDA engines of cross_entropy. An engine computes the statistics of
// the rows of logits, the gradient of the logits, or both.
#pragma once

#include "losses/loss.h"

namespace torchweld::cross_entropy_op {

struct LogitInputs {
  Tensor logits;  // (..., N)
  Tensor target;  // (...), as the caller passed it
  LossOptions options;
  Tensor targets = target_of_rows(target, options);  // (rows,) int64
};

// The vectors over all rows (rows.loss, rows.lse and dloss) are in the accumulation dtype. If
// rows.loss is undefined, rows.lse is an input. dloss may have stride 0. dlogits is contiguous, or
// undefined if no gradient is requested. For an ignored row, the engine does not write rows.loss
// and rows.lse, and it sets dlogits to 0.
using Engine = void (*)(const char* op, const LogitInputs& in, const LossRows& rows,
                        const Tensor& dloss, const Tensor& dlogits);

void cross_entropy_rows_cpu(const char* op, const LogitInputs& in, const LossRows& rows,
                            const Tensor& dloss, const Tensor& dlogits);
#ifdef TORCHWELD_CUDA
void cross_entropy_rows_cuda(const char* op, const LogitInputs& in, const LossRows& rows,
                             const Tensor& dloss, const Tensor& dlogits);
#endif

}  // namespace torchweld::cross_entropy_op
