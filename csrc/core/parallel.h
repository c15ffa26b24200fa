// Runs tasks on CPU threads.
#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>

namespace torchweld {

// Calls body(task) for every task index below `tasks` on torch's thread pool. In body, ops run
// below autograd on one thread.
// NOTE: at::parallel_for can't be used. It is a template that uses threads only if its caller is
// compiled with OpenMP, which would add a second thread pool. TensorIterator's loop is compiled
// into torch.
void parallel_tasks(int64_t tasks, c10::function_ref<void(int64_t)> body);

// Maps i to the blocks 0, count - 1, 1, count - 2, ... of rows under a causal mask. Rows of low
// blocks see few keys and rows of high blocks see many, so consecutive tasks of a thread mix both.
inline int64_t from_both_ends(int64_t i, int64_t count) {
  return i % 2 ? count - 1 - i / 2 : i / 2;
}

}  // namespace torchweld
