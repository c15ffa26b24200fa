// A gradient that may write over what its forward kept: dz over the pre-activation, of which nobody
// has any use then. It is as large as y, and would be there twice.
//
// A Function asks for a Donation around its backward op, whose kernels ask `over` for dz's memory.
// torch.compile calls the same a donated buffer.
#pragma once

#include <ATen/SavedTensorHooks.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include "core/check.h"

namespace torchweld {

class Donation {
 public:
  // In a Function's forward, where it saves the tensor. A hook that packs it may keep it.
  static void prepare(torch::autograd::AutogradContext* ctx) {
    ctx->saved_data["donates"] = !at::SavedTensorDefaultHooks::get_hooks().has_value();
  }

  // In its backward. saved: of get_saved_variables(), so that the graph and the caller have it.
  // Where anybody else does, or the graph is kept, nothing is given away.
  Donation(torch::autograd::AutogradContext* ctx, const Tensor& saved) {
    const bool alone = saved.defined() && saved.use_count() == 2 && saved.has_storage() &&
                       saved.storage().use_count() == 1;
    if (alone && ctx->saved_data["donates"].toBool() &&
        !torch::autograd::get_current_graph_task_keep_graph()) {
      given() = saved.unsafeGetTensorImpl();
      // A backward that fails from here on can't be asked again: autograd refuses changed tensors.
      saved.unsafeGetTensorImpl()->bump_version();
    }
  }
  ~Donation() { given() = nullptr; }
  Donation(const Donation&) = delete;
  Donation& operator=(const Donation&) = delete;

  static bool gives(const Tensor& t) { return given() == t.unsafeGetTensorImpl(); }
  // The tensor itself where it is given away, or one of size (0,) for an out= variant to resize.
  static Tensor over(const Tensor& t) { return gives(t) ? t : at::empty({0}, t.options()); }

 private:
  static const at::TensorImpl*& given() {
    static thread_local const at::TensorImpl* tensor = nullptr;
    return tensor;
  }
};

}  // namespace torchweld
