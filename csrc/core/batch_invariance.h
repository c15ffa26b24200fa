// The batch-invariant mode: a row of a result has the same bits whatever rows stand beside it.
//
// Every sum of a row then has an order that depends on the sizes of the row alone, never on the
// number of rows. Most kernels keep this rule anyway. The others ask is_batch_invariant() when they
// choose a kernel. The mode belongs to a thread; autograd hands it to the threads of a backward.
#pragma once

namespace torchweld {

// Whether the calls of this thread must be batch invariant. A thread starts with the mode off, or
// on if the environment variable TORCHWELD_BATCH_INVARIANT is 1.
bool is_batch_invariant();

// Sets the mode of this thread. Returns the previous mode.
bool set_batch_invariant(bool on);

// While an object of this class exists, the mode of its thread is `on`.
class BatchInvariantScope {
 public:
  explicit BatchInvariantScope(bool on) : before_(set_batch_invariant(on)) {}
  ~BatchInvariantScope() { set_batch_invariant(before_); }
  BatchInvariantScope(const BatchInvariantScope&) = delete;

 private:
  bool before_;
};

}  // namespace torchweld
