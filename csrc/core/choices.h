// Which configuration a call takes: one that tune tries on this thread, one that it has remembered,
// or the family's own choice. Launchers ask `pick`, which costs one load where nothing is forced,
// remembered or watched. Knows no torch header.
//
// A remembered choice is kept by its problem, not by its op: `pick` sees the numbers that the
// kernels read, so the key can lack none of them, and ops that run the same product share it.
#pragma once

#include <atomic>

#include "core/tuning.h"

namespace torchweld {

// How many reasons there are to look further than the family's own choice.
extern std::atomic<int> choices_in_use;

// `own`, or what is forced or remembered instead. Throws where the forced choice can't be taken.
Numbers resolve_choice(const char* family, const Numbers& problem, const Numbers& own);

// Tells a watching thread what runs.
void watch_kernel(const void* kernel, int threads, int dynamic_shared_bytes);

template <typename Family>
typename Family::Choice pick(const typename Family::Problem& problem) {
  const auto own = Family::choose(problem);
  if (choices_in_use.load(std::memory_order_relaxed) == 0) return own;
  const Numbers told = Family::told(own);
  const Numbers chosen = resolve_choice(Family::kName, Family::numbers(problem), told);
  return chosen == told ? own : Family::make(problem, chosen);
}

template <typename Kernel>
void note_kernel(Kernel* kernel, int threads, int dynamic_shared_bytes) {
  if (choices_in_use.load(std::memory_order_relaxed) == 0) return;
  watch_kernel(reinterpret_cast<const void*>(kernel), threads, dynamic_shared_bytes);
}

}  // namespace torchweld
