// outer_mul_relu: the launcher. The kernel is in pointwise/matrix_pass.cuh.
#include "ops/outer_mul_relu/outer_mul_relu.h"

#include "ops/outer_mul_relu/outer_mul_relu_cell.h"
#include "pointwise/matrix_launch.cuh"

namespace torchweld {

void launch_outer_mul_relu(const MatrixPassParams& params, cudaStream_t stream) {
  launch_matrix_pass(params, OuterMulReluCell{}, stream);
  check_launch("outer_mul_relu");
}

}  // namespace torchweld
