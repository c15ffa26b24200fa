// bmm:       y = a @ b           a (batch, M, K), b (batch, K, N), y (batch, M, N)
// Gradient:  da = dy @ b^T, db = a^T @ dy
//
// If the batch of an operand is 1, the op multiplies every matrix of the other operand by this one
// matrix. The gradient of this one matrix is summed over the batch of dy. A single matmul computes
// the product and the sum. Therefore the gradient is rounded only once, and its sum has a fixed
// order.
#include <ATen/ops/bmm.h>
#include <ATen/ops/mm.h>

#include "core/batch_invariance.h"
#include "core/choices.h"
#include "core/dispatch.h"
#include "core/linear_common.h"
#include "core/matmul_cpu.h"

#ifdef TORCHWELD_CUDA
#include "core/cuda_inputs.h"
#include "layers/matmul.h"
#endif

namespace torchweld::bmm_op {
namespace {

// Checks the arguments and returns the sizes of y.
std::vector<c10::SymInt> check_bmm(const char* op, const Tensor& a, const Tensor& b) {
  check_floating(op, "a", a);
  check_dim(op, "a", a, 3, "(batch, M, K)");
  check_like(op, "b", b, "a", a);
  check_dim(op, "b", b, 3, "(batch, K, N)");
  const c10::SymInt batch =
      a.sym_size(0) == 1 || b.sym_size(0) == 1 ? b.sym_size(0) : a.sym_size(0);
  check_shape(op, "b", b, {batch, a.sym_size(2), b.sym_size(2)}, "(batch, K, N)");
  return {a.sym_size(0) == 1 ? batch : a.sym_size(0), a.sym_size(1), b.sym_size(2)};
}

Tensor bmm_meta(const Tensor& a, const Tensor& b) {
  return at::empty_symint(check_bmm("bmm", a, b), a.options());
}

Grads2 bmm_backward_meta(const Tensor& dy, const Tensor& a, const Tensor& b,
                         std::array<bool, 2> output_mask) {
  const char* op = "bmm_backward";
  const auto sizes = check_bmm(op, a, b);
  check_like(op, "dy", dy, "a", a);
  check_shape(op, "dy", dy, sizes, "(batch, M, N)");
  return {empty_input_grad(a, output_mask[0]), empty_input_grad(b, output_mask[1])};
}

// Returns t (batch, rows, n) as one matrix (batch * rows, n). If all rows of t are evenly spaced in
// memory, the function makes no copy.
Tensor stack_rows(const Tensor& t) { return t.reshape({t.size(0) * t.size(1), t.size(2)}); }

bool shared(const Tensor& t, const Tensor& dy) { return t.size(0) == 1 && dy.size(0) != 1; }

// Computes the gradients. multiply(y, left, right) is the matmul of a device and must compute y =
// left @ right. y is (M, N) or (batch, M, N). If y is (batch, M, N), the batch of left is `batch`
// or 1, and the batch of right is `batch` or 1.
template <typename Multiply>
void bmm_backward_into(Tensor& da, Tensor& db, const std::array<bool, 2>& wanted, const Tensor& dy,
                       const Tensor& a, const Tensor& b, const Multiply& multiply) {
  if (wanted[0]) {
    const CallScope part("da");
    if (shared(a, dy)) {
      multiply(da[0], stack_rows(dy.mT()).t(), stack_rows(b.mT()));
    } else {
      multiply(da, dy, b.mT());
    }
  }
  if (wanted[1]) {
    const CallScope part("db");
    if (shared(b, dy)) {
      multiply(db[0], stack_rows(a).t(), stack_rows(dy));
    } else {
      multiply(db, a.mT(), dy);
    }
  }
}

// NOTE: at::matmul can't be used, because its choice of a kernel depends on requires_grad. The same
// call would give different bits with and without gradients.
void multiply_cpu(Tensor y, const Tensor& left, const Tensor& right) {
  if (is_batch_invariant()) {
    const auto matrix = [](const Tensor& t, int64_t i) {
      return t.dim() == 2 ? t : t.select(0, t.size(0) == 1 ? 0 : i);
    };
    for (int64_t i = 0; i < (y.dim() == 2 ? 1 : y.size(0)); ++i) {
      matrix(y, i).copy_(invariant_product(matrix(left, i), matrix(right, i)));
    }
  } else if (y.dim() == 2) {
    at::mm_out(y, left, right);
  } else {
    const auto batched = [&](const Tensor& t) {
      return t.size(0) == y.size(0) ? t : t.expand({y.size(0), -1, -1});
    };
    at::bmm_out(y, batched(left), batched(right));
  }
}

Tensor bmm_cpu(const Tensor& a, const Tensor& b) {
  Tensor y = bmm_meta(a, b);
  multiply_cpu(y, a, b);
  return y;
}

Grads2 bmm_backward_cpu(const Tensor& dy, const Tensor& a, const Tensor& b,
                        std::array<bool, 2> output_mask) {
  auto [da, db] = bmm_backward_meta(dy, a, b, output_mask);
  bmm_backward_into(da, db, output_mask, dy, a, b, multiply_cpu);
  return {da, db};
}

#ifdef TORCHWELD_CUDA
void multiply_cuda(const Tensor& y, const Tensor& left, const Tensor& right) {
  matmul_into(y, left, Matrix(right).t());
}

// Whether the batch and the rows of `t` form one evenly strided dim in memory.
bool stacks(const Tensor& t) { return t.stride(0) == t.size(1) * t.stride(1); }

Tensor bmm_cuda(const Tensor& a, const Tensor& b) {
  const Tensor y = bmm_meta(a, b);
  const OnDevice on(a.device());
  if (shared(b, y) && stacks(a)) {
    // If all matrices of `a` multiply one b, run one tall matmul. A tall matmul fills its tiles
    // better than many short matmuls.
    multiply_cuda(stack_rows(y), stack_rows(a), b[0]);
  } else {
    multiply_cuda(y, a, b);
  }
  return y;
}

Grads2 bmm_backward_cuda(const Tensor& dy, const Tensor& a, const Tensor& b,
                         std::array<bool, 2> output_mask) {
  auto [da, db] = bmm_backward_meta(dy, a, b, output_mask);
  const OnDevice on(a.device());
  bmm_backward_into(da, db, output_mask, dy, a, b, multiply_cuda);
  return {da, db};
}
#endif

TW_OP(bmm);
TW_OP(bmm_backward);

TORCH_LIBRARY_FRAGMENT(torchweld, m) {
  define_op(m, "bmm(Tensor a, Tensor b) -> Tensor", TW_KERNELS(bmm),
            recorded_by<FunctionOfTwo<bmm_call, bmm_backward_call>>(call_bmm));
  define_op(m,
            "bmm_backward(Tensor dy, Tensor a, Tensor b, *, bool[2] output_mask) -> "
            "(Tensor da, Tensor db)",
            TW_KERNELS(bmm_backward), no_gradient_function());
  define_autocast(m, call_bmm);
}

}  // namespace
}  // namespace torchweld::bmm_op
