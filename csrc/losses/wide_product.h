// Matmuls of 16-bit operands with an fp32 result, by torch. This is host code for CUDA builds only.
#pragma once

#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>

#include "core/check.h"
#include "core/observe.h"

namespace torchweld {

// Computes to = a @ b, or to += a @ b, for 16-bit a and b and an fp32 result.
// NOTE: returns at once in a dry run, whose tensors have no memory, because torch can't run these
// matmuls on such tensors.
inline void wide_product_into(Tensor& to, const Tensor& a, const Tensor& b, bool add = false) {
  if (is_dry_run()) return;
  if (add) {
    at::addmm_out(to, to, a, b, at::kFloat);
  } else {
    at::mm_out(to, a, b, at::kFloat);
  }
}

}  // namespace torchweld
