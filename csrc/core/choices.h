// Picks the kernel configuration of a call. If tune forces a configuration on this thread, pick()
// returns that one. Otherwise, if a configuration is remembered for the problem, pick() returns
// that one. Otherwise it returns the heuristic choice. In most calls no choice is forced or
// remembered, and no thread observes choices; pick() finds this out with a single load. This header
// includes no torch header.
#pragma once

#include <optional>

#include "core/family.h"
#include "core/observe.h"

namespace torchweld {

// Returns the choice that is forced or remembered for the problem, or `heuristic` if there is none.
// Throws an error if the forced choice is illegal.
Encoded resolve_choice(const char* family, const Encoded& problem, const Encoded& heuristic);

// Returns the heuristic choice for a problem. Each thread caches its latest heuristic choices. For
// a matmul, the heuristic compares a hundred configurations, which takes longer than a launch.
template <typename KernelFamily>
typename KernelFamily::Choice heuristic_choice(const Encoded& encoded,
                                               const typename KernelFamily::Problem& problem) {
  struct Entry {
    Encoded encoded;
    std::optional<typename KernelFamily::Choice> choice;
  };
  constexpr uint64_t kEntries = 128;
  thread_local Entry cache[kEntries];
  Entry& entry = cache[encoded.hash() % kEntries];
  if (!entry.choice || entry.encoded != encoded) {
    entry.choice = KernelFamily::choose(problem);
    entry.encoded = encoded;
  }
  return *entry.choice;
}

template <typename KernelFamily>
typename KernelFamily::Choice pick(const typename KernelFamily::Problem& problem) {
  const Encoded encoded = encode_problem<KernelFamily>(problem);
  const auto heuristic = heuristic_choice<KernelFamily>(encoded, problem);
  if (!is_observed()) return heuristic;
  const Encoded heuristic_encoded = KernelFamily::encode(heuristic);
  const Encoded chosen = resolve_choice(KernelFamily::kName, encoded, heuristic_encoded);
  return chosen == heuristic_encoded ? heuristic : KernelFamily::make(problem, chosen);
}

// While an object of this class exists, every choice that this thread picks is labelled with
// `name`, the name of a part of the call, e.g. "dx".
class CallScope {
 public:
  explicit CallScope(const char* name) : before_(exchange(name)) {}
  ~CallScope() { exchange(before_); }
  CallScope(const CallScope&) = delete;

 private:
  static const char* exchange(const char* name);
  const char* before_;
};

}  // namespace torchweld
