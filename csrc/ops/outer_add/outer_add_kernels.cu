// outer_add: the launcher. The kernel is in pointwise/matrix_pass.cuh.
#include "ops/outer_add/outer_add.h"

#include "ops/outer_add/outer_add_cell.h"
#include "pointwise/matrix_launch.cuh"

namespace torchweld {

void launch_outer_add(const MatrixPassParams& params, cudaStream_t stream) {
  launch_matrix_pass(params, OuterAddCell{}, stream);
  check_launch("outer_add");
}

}  // namespace torchweld
