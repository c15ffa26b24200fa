// Matmuls of torch with 16-bit operands and an fp32 result. This is host code for CUDA builds only.
#pragma once

#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>

#include "core/check.h"
#include "core/observe.h"

namespace torchweld {

// Computes to = a @ b, or to += a @ b if `add` is true. a and b are 16-bit, and `to` is fp32.
// NOTE: in a dry run the function returns at once. The tensors of a dry run have no memory, and
// torch can't run these matmuls on such tensors.
inline void wide_product_into(Tensor& to, const Tensor& a, const Tensor& b, bool add = false) {
  if (is_dry_run()) return;
  if (add) {
    at::addmm_out(to, to, a, b, at::kFloat);
  } else {
    at::mm_out(to, a, b, at::kFloat);
  }
}

}  // namespace torchweld
