// Launches outer_add and its backward. The kernel is in pointwise/matrix_pass.cuh.
#include "puzzles/outer_add/outer_add.h"

#include "pointwise/matrix_launch.cuh"
#include "puzzles/outer_add/cell.h"

namespace torchweld {

void launch_outer_add(const MatrixPassParams& params, cudaStream_t stream) {
  launch_matrix_pass(params, OuterAddCell{}, stream);
  check_launch("outer_add");
}

void launch_outer_add_backward(const MatrixPassParams& params, cudaStream_t stream) {
  launch_matrix_pass(params, OuterAddBackwardCell{}, stream);
  check_launch("outer_add_backward");
}

}  // namespace torchweld
