// Calls the matmul whose epilogue computes the gradient of a gate (gemm/sm90/gate_backward.h). This
// is host code for CUDA builds only.
#pragma once

#include "core/batch_invariance.h"
#include "gemm/config.h"
#include "gemm/sm90/gate_backward.h"
#include "layers/norm_linear.h"

namespace torchweld {

// Compares two ways to compute dz. One way is a single kernel, which computes dy @ down and, in its
// epilogue, the gradient of the gate. The other way is a plain matmul and then a pass over dact and
// z. This pass reads three values per element of dact and writes three values. Returns true if the
// single kernel is faster.
inline bool fuses_gate_backward(const GemmProblem& p) {
  if (gate_backward_refusal(p)) return false;
  const GemmChoice plain = choose_gemm(p);
  return gate_backward_seconds(p) <
         gemm_seconds(p, plain.engine, plain.tile, plain.splits) + gate_transfer_seconds(p, 6);
}

// Returns dz. The kernel computes dz from rows (M, K) @ down (K, N) and does not store this
// product. If z (M, 2N) is donated, dz overwrites z. If `act` is defined and not empty, it
// receives the result of the gate. If `groups` is given, down is (E, K, N), the gate is swiglu and
// `weights` are those of the rows. If the kernel does not support the tensors or would be slower,
// the function computes nothing and returns an undefined tensor.
inline Tensor gate_backward_matmul(const Tensor& act, const Tensor& z, const Tensor& rows,
                                   const Tensor& down, Gate gate, MatmulGroups* groups = nullptr,
                                   const RouteWeights& weights = {}) {
  const auto is_aligned = [](const Tensor& t) {
    return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
  };
  const int64_t m = rows.size(0), k = rows.size(1), n = down.size(-1);
  const bool in_place = rows.stride(1) == 1 && rows.stride(0) % 8 == 0 && k % 8 == 0 &&
                        down.is_contiguous() && z.is_contiguous() && is_aligned(rows) &&
                        is_aligned(down) && is_aligned(z);
  if (!in_place || m == 0 || n == 0) return {};
  const DType dtype = dtype_of(z);
  const GemmProblem problem{m,
                            n,
                            k,
                            groups != nullptr ? groups->ends.numel() : 1,
                            /*gated=*/false,
                            /*pointwise=*/false,
                            gemm_math(dtype, /*tf32=*/false),
                            /*a_k_major=*/true,
                            /*b_k_major=*/false,
                            /*normed=*/false,
                            device_facts(),
                            groups != nullptr ? Grouped::kRows : Grouped::kNone};
  if (is_batch_invariant() || !fuses_gate_backward(problem)) return {};
  const Tensor dz = matrix_over(z);
  GateBackwardMatmulParams p{};
  p.gemm.m = m;
  p.gemm.n = n;
  p.gemm.k = k;
  p.gemm.batch = 1;
  p.gemm.a = {rows.const_data_ptr(), rows.stride(0), 1, 0};
  p.gemm.b = {down.const_data_ptr(), 1, n, groups != nullptr ? k * n : 0};
  p.gemm.dtype = dtype;
  if (groups != nullptr) {
    set_groups(p.gemm, *groups, Grouped::kRows, gate_backward_tile().group_rows());
  }
  p.gate = gate;
  p.z = z.const_data_ptr();
  p.dz = dz.mutable_data_ptr();
  p.act = data_if_wanted(act);
  p.weights = weights;
  launch_gate_backward_matmul(p, current_stream());
  return dz;
}

}  // namespace torchweld
