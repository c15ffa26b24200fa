// Launches outer_mul_relu and its backward. The kernel is in pointwise/matrix_pass.cuh.
#include "puzzles/outer_mul_relu/outer_mul_relu.h"

#include "pointwise/matrix_launch.cuh"
#include "puzzles/outer_mul_relu/cell.h"

namespace torchweld {

void launch_outer_mul_relu(const MatrixPassParams& params, cudaStream_t stream) {
  launch_matrix_pass(params, OuterMulReluCell{}, stream);
  check_launch("outer_mul_relu");
}

void launch_outer_mul_relu_backward(const MatrixPassParams& params, cudaStream_t stream) {
  launch_matrix_pass(params, OuterMulReluBackwardCell{}, stream);
  check_launch("outer_mul_relu_backward");
}

}  // namespace torchweld
