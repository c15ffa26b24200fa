// Which configuration a call takes: one that tune tries on this thread, one that it has remembered,
// or the family's own choice. Launchers ask `pick`, which costs one load where nothing is forced,
// remembered or watched. Knows no torch header.
#pragma once

#include "core/family.h"
#include "core/watch.h"

namespace torchweld {

// `own`, or what is forced or remembered instead. Throws where the forced choice can't be taken.
Numbers resolve_choice(const char* family, const Numbers& problem, const Numbers& own);

template <typename Family>
typename Family::Choice pick(const typename Family::Problem& problem) {
  const auto own = Family::choose(problem);
  if (!anybody_watches()) return own;
  const Numbers told = Family::told(own);
  const Numbers chosen = resolve_choice(Family::kName, numbers_of<Family>(problem), told);
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
