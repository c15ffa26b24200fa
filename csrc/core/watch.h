// A thread may watch what it chooses and launches (tune), or ask for a dry run (explain): the host
// code of a call runs as ever, on tensors without memory, and nothing reaches the GPU.
#pragma once

#include <atomic>

namespace torchweld {

// How many reasons there are to look further: forced or remembered choices, watching threads.
extern std::atomic<int> choices_in_use;

inline bool is_observed() { return choices_in_use.load(std::memory_order_relaxed) != 0; }

// True where this thread's launches are told, but not made.
bool this_thread_runs_dry();
inline bool is_dry_run() { return is_observed() && this_thread_runs_dry(); }

// Tells a watching thread what runs.
void observe_launch(const void* kernel, int threads, int dynamic_shared_bytes);

}  // namespace torchweld
