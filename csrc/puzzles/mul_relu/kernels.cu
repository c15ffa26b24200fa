// Launches mul_relu and its backward. The kernel is in pointwise/matrix_pass.cuh.
#include "puzzles/mul_relu/mul_relu.h"

#include "pointwise/matrix_launch.cuh"
#include "puzzles/mul_relu/cell.h"

namespace torchweld {

void launch_mul_relu(const MatrixPassParams& params, cudaStream_t stream) {
  launch_matrix_pass(params, MulReluCell{}, stream);
  check_launch("mul_relu");
}

void launch_mul_relu_backward(const MatrixPassParams& params, cudaStream_t stream) {
  launch_matrix_pass(params, MulReluBackwardCell{}, stream);
  check_launch("mul_relu_backward");
}

}  // namespace torchweld
