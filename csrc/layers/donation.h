// A donated buffer: the backward overwrites a tensor that the forward has saved, because nothing
// reads it afterwards. For example, dz overwrites the pre-activation z. z is as large as y; without
// the donation, z and dz would both be in memory.
//
// An autograd Function creates a Donation around the call of its backward op. The kernels of that
// op then write dz to the memory that `over` returns.
#pragma once

#include <ATen/SavedTensorHooks.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include "core/check.h"

namespace torchweld {

class Donation {
 public:
  // The forward of a Function calls this when it saves the tensor. If a saved-tensor hook is
  // active, nothing is donated, because the hook may keep the tensor.
  static void prepare(torch::autograd::AutogradContext* ctx) {
    ctx->saved_data["donates"] = !has_hooks();
  }

  // Whether a Function may donate a tensor that it computes from t and saves. The forward calls
  // this before it decides what to save.
  static bool is_possible(const Tensor& t) { return !has_hooks() && runs_once(t, t); }

  // The backward of a Function creates this object. `saved` comes from get_saved_variables(), so
  // the graph and the caller hold references to it. It is donated only if nothing else does, the
  // graph is freed afterwards, and the backward op runs exactly once.
  Donation(torch::autograd::AutogradContext* ctx, const Tensor& saved, const Tensor& grad) {
    const bool alone = saved.defined() && saved.use_count() == 2 && saved.has_storage() &&
                       saved.storage().use_count() == 1;
    if (alone && ctx->saved_data["donates"].toBool() && runs_once(saved, grad) &&
        !torch::autograd::get_current_graph_task_keep_graph()) {
      donated() = saved.unsafeGetTensorImpl();
      // If backward fails after this line, autograd refuses to run it again, because the version of
      // the saved tensor has changed.
      saved.unsafeGetTensorImpl()->bump_version();
    }
  }
  ~Donation() { donated() = nullptr; }
  Donation(const Donation&) = delete;
  Donation& operator=(const Donation&) = delete;

  static bool gives(const Tensor& t) { return donated() == t.unsafeGetTensorImpl(); }
  // The memory for dz: `t` itself if it is donated, else a new tensor with the same strides, so
  // that the gradients have the same bits either way.
  static Tensor over(const Tensor& t) { return gives(t) ? t : at::empty_like(t); }

 private:
  static bool has_hooks() { return at::SavedTensorDefaultHooks::get_hooks().has_value(); }

  // True if the call reaches a CPU or CUDA kernel directly. A transform (vmap over a batch of
  // gradients), a dispatch mode or a tensor subclass may run the backward op several times.
  static bool runs_once(const Tensor& saved, const Tensor& grad) {
    using c10::DispatchKey;
    static const c10::DispatchKeySet plain = c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                                             c10::DispatchKeySet(c10::BackendComponent::CPUBit) |
                                             c10::DispatchKeySet(c10::BackendComponent::CUDABit) |
                                             c10::DispatchKeySet(DispatchKey::Dense) |
                                             c10::autocast_dispatch_keyset;
    static const c10::DispatchKeySet modes({DispatchKey::FuncTorchDynamicLayerFrontMode,
                                            DispatchKey::Python, DispatchKey::PythonTLSSnapshot,
                                            DispatchKey::PreDispatch, DispatchKey::Functionalize});
    const auto is_plain = [](const Tensor& t) {
      return (t.key_set().raw_repr() & ~plain.raw_repr()) == 0;
    };
    const auto included = c10::impl::tls_local_dispatch_key_set().included_;
    return !included.has_any(modes) && is_plain(saved) && is_plain(grad);
  }

  static const at::TensorImpl*& donated() {
    static thread_local const at::TensorImpl* tensor = nullptr;
    return tensor;
  }
};

}  // namespace torchweld
