// Threads on the CPU.
#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>

namespace torchweld {

// Calls body(task) for every task below `tasks`, spread over torch's own threads. Inside, ops run
// below autograd, on one thread.
// NOTE: at::parallel_for is a template that threads only where its caller is compiled with OpenMP,
// which would bring a second thread pool; TensorIterator's loop is compiled into torch.
void parallel_tasks(int64_t tasks, c10::function_ref<void(int64_t)> body);

// The blocks 0, count - 1, 1, count - 2, ...: where a thread takes a half of the tasks, block by
// block, it gets as many rows that see few keys as rows that see many.
inline int64_t from_both_ends(int64_t turn, int64_t count) {
  return turn % 2 ? count - 1 - turn / 2 : turn / 2;
}

}  // namespace torchweld
