#include "core/parallel.h"

#include <ATen/TensorIterator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>

#include "core/batch_invariance.h"

namespace torchweld {

void parallel_tasks(int64_t tasks, c10::function_ref<void(int64_t)> body) {
  if (tasks <= 1) {
    if (tasks == 1) body(0);
    return;
  }
  // `marks` has one byte per task. The index of a task is the index of its byte in `marks`.
  at::Tensor marks = at::empty({tasks}, at::kByte);
  const char* const base = static_cast<const char*>(marks.const_data_ptr());
  auto loop = at::TensorIterator::nullary_op(marks);
  const bool invariant = is_batch_invariant();
  loop.for_each(
      [&](char** data, const int64_t* strides, int64_t inner, int64_t outer) {
        // These guards are needed in every thread of the pool, because the state of the dispatcher
        // and the batch-invariant mode are thread-local.
        const at::AutoDispatchBelowADInplaceOrView below;
        const BatchInvariantScope mode(invariant);
        for (int64_t j = 0; j < outer; ++j) {
          for (int64_t i = 0; i < inner; ++i) {
            body(data[0] - base + j * strides[1] + i * strides[0]);
          }
        }
      },
      /*grain_size=*/1);
}

}  // namespace torchweld
