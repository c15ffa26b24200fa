// Picks the engine and the tile of a row softmax.
#include "core/choices.h"
#include "softmax/family.h"

namespace torchweld {

SoftmaxChoice pick_softmax(const SoftmaxProblem& p) { return pick<SoftmaxFamily>(p); }

}  // namespace torchweld
