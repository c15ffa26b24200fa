// Launches add_scalar. The kernel is in pointwise/matrix_pass.cuh.
#include "puzzles/add_scalar/add_scalar.h"

#include "pointwise/matrix_launch.cuh"

namespace torchweld {
namespace {

// in[0] is x.
struct AddScalarCell {
  static constexpr int kReads = 1;
  static constexpr bool kRowValues = false, kColumnValues = false, kWrites = true;
  static constexpr bool kRowSums = false, kColumnSums = false;
  float value;

  __device__ __forceinline__ void operator()(Cell<float>& cell) const {
    cell.out = cell.in[0] + value;
  }
};

}  // namespace

void launch_add_scalar(const MatrixPassParams& params, float value, cudaStream_t stream) {
  launch_matrix_pass(params, AddScalarCell{value}, stream);
  check_launch("add_scalar");
}

}  // namespace torchweld
