// Runs tasks on CPU threads.
#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>

namespace torchweld {

// Calls body(task) for every task index less than `tasks`, on torch's thread pool. Torch ops that
// body calls run without autograd and on a single thread.
// NOTE: at::parallel_for can't be used. It is a template that uses threads only if this library is
// compiled with OpenMP, and OpenMP would add a second thread pool. The implementation uses the loop
// of TensorIterator, which is compiled into torch.
void parallel_tasks(int64_t tasks, c10::function_ref<void(int64_t)> body);

// Maps i = 0, 1, 2, 3, ... to 0, count - 1, 1, count - 2, ... This order is for blocks of rows
// under a causal mask: the first blocks see few keys, and the last blocks see many. With this
// order, a thread with consecutive tasks computes blocks of both kinds.
inline int64_t from_both_ends(int64_t i, int64_t count) {
  return i % 2 ? count - 1 - i / 2 : i / 2;
}

}  // namespace torchweld
