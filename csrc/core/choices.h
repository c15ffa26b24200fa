// Which configuration a call takes: one that tune tries on this thread, one that it has remembered,
// or the family's own choice. Launchers ask `pick`, which costs one load where nothing is forced,
// remembered or watched. Knows no torch header.
#pragma once

#include <optional>

#include "core/family.h"
#include "core/watch.h"

namespace torchweld {

// `own`, or what is forced or remembered instead. Throws where the forced choice can't be taken.
Numbers resolve_choice(const char* family, const Numbers& problem, const Numbers& own);

// The family's own choice. The last ones of a thread are kept: a matmul weighs a hundred
// configurations, in more time than a launch takes.
template <typename Family>
typename Family::Choice own_choice(const Numbers& numbers,
                                   const typename Family::Problem& problem) {
  struct Kept {
    Numbers numbers;
    std::optional<typename Family::Choice> choice;
  };
  constexpr uint64_t kKept = 128;
  thread_local Kept all[kKept];
  Kept& kept = all[numbers.hash() % kKept];
  if (!kept.choice || kept.numbers != numbers) {
    kept.choice = Family::choose(problem);
    kept.numbers = numbers;
  }
  return *kept.choice;
}

template <typename Family>
typename Family::Choice pick(const typename Family::Problem& problem) {
  const Numbers numbers = numbers_of<Family>(problem);
  const auto own = own_choice<Family>(numbers, problem);
  if (!is_observed()) return own;
  const Numbers told = Family::told(own);
  const Numbers chosen = resolve_choice(Family::kName, numbers, told);
  return chosen == told ? own : Family::make(problem, chosen);
}

// While it lives, what is picked belongs to this part of a call, e.g. "dx".
class CallPart {
 public:
  explicit CallPart(const char* name) : before_(exchange(name)) {}
  ~CallPart() { exchange(before_); }
  CallPart(const CallPart&) = delete;

 private:
  static const char* exchange(const char* name);
  const char* before_;
};

}  // namespace torchweld
