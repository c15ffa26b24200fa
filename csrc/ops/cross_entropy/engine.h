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

// The loss of each row, and the statistics that the gradient needs: lse = max + log_sum. The sum
// rounds at the size of the logits, so its terms are stored.
struct LogitRows {
  Tensor loss;  // if undefined, max and log_sum are inputs
  Tensor max, log_sum;
};

// The vectors over all rows (`rows` and dloss) are in the accumulation dtype. dloss may have stride
// 0. dlogits is contiguous, or undefined if no gradient is requested. For an ignored row, the
// engine does not write to `rows`, and it sets dlogits to 0.
using Engine = void (*)(const char* op, const LogitInputs& in, const LogitRows& rows,
                        const Tensor& dloss, const Tensor& dlogits);

void cross_entropy_rows_cpu(const char* op, const LogitInputs& in, const LogitRows& rows,
                            const Tensor& dloss, const Tensor& dlogits);
#ifdef TORCHWELD_CUDA
void cross_entropy_rows_cuda(const char* op, const LogitInputs& in, const LogitRows& rows,
                             const Tensor& dloss, const Tensor& dlogits);
#endif

}  // namespace torchweld::cross_entropy_op
