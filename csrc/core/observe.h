// A thread can observe its own choices and launches, for tune. It can also start a dry run, for
// explain. A dry run executes the host code of a call, but its tensors have no memory and no kernel
// is launched.
#pragma once

#include <atomic>

namespace torchweld {

struct DeviceFacts;

// The number of threads that force choices, plus the number of threads that observe choices, plus 1
// if any choices are remembered.
extern std::atomic<int> choices_in_use;

inline bool is_observed() { return choices_in_use.load(std::memory_order_relaxed) != 0; }

// Whether this thread is in a dry run. In a dry run the thread records launches but executes none.
bool thread_is_dry_run();
inline bool is_dry_run() { return is_observed() && thread_is_dry_run(); }

// Returns the facts of the GPU that this thread's dry run assumes. Only for use in a dry run.
const DeviceFacts* assumed_device_facts();

// Records a launch if this thread observes its launches.
void observe_launch(const void* kernel, int threads, int dynamic_shared_bytes);

}  // namespace torchweld
