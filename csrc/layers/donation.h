// Donation saves memory in the backward. A saved tensor is donated if the backward may overwrite
// it, because nothing reads the tensor afterwards. For example, dz overwrites the pre-activation z.
// z is as large as y, and without the donation both z and dz would be in memory.
//
// The backward of an autograd Function creates a Donation object before the Function calls its
// backward op. The kernels of the backward op write dz to the memory that `over` returns.
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
  // The forward of a Function must call prepare() when it saves the tensor. If a saved-tensor hook
  // is active, the tensor is not donated, because the hook may keep a reference to the tensor.
  static void prepare(torch::autograd::AutogradContext* ctx) {
    ctx->saved_data["donates"] = !has_hooks();
  }

  // Whether the backward may overwrite a tensor that the forward computes from t and saves. The
  // forward calls is_possible() before it decides what to save.
  static bool is_possible(const Tensor& t) { return !has_hooks() && runs_once(t, t); }

  // The backward of a Function creates this object. `saved` comes from get_saved_variables(), so
  // the graph and the caller hold one reference each. `saved` is donated if three conditions hold:
  // there is no third reference, the graph is freed after the backward, and the backward op runs
  // exactly once.
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
  // Returns the memory for dz: `t` itself if it is donated, else a new tensor. The new tensor has
  // the strides of t, so that a donation does not change the bits of the gradients.
  static Tensor over(const Tensor& t) { return gives(t) ? t : at::empty_like(t); }

 private:
  static bool has_hooks() { return at::SavedTensorDefaultHooks::get_hooks().has_value(); }

  // Whether the backward op runs exactly once. This is so if a call of the op goes directly to a
  // CPU or CUDA kernel. A transform (vmap over a batch of gradients), a dispatch mode or a tensor
  // subclass may run the op several times.
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
