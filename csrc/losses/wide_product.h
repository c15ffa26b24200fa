// Products of 16-bit operands in fp32, by torch. Host code of CUDA builds only.
#pragma once

#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>

#include "core/check.h"
#include "core/observe.h"

namespace torchweld {

// to = a @ b, or to += a @ b, in fp32 for 16-bit operands. NOTE: torch has no such products of the
// tensors without memory that a dry run has.
inline void wide_product_into(Tensor& to, const Tensor& a, const Tensor& b, bool add = false) {
  if (is_dry_run()) return;
  if (add) {
    at::addmm_out(to, to, a, b, at::kFloat);
  } else {
    at::mm_out(to, a, b, at::kFloat);
  }
}

}  // namespace torchweld
