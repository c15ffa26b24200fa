// What tune, the remembered choices and explain share: a problem and a choice as plain numbers.
// Pure host code.
//
// A family is a kind of kernel that has several configurations, described by a struct of statics:
//   kName, kProblem, kChoice            names, and the bounds that a problem must keep
//   Problem, Choice                     what its choose function takes and returns
//   numbers(problem), problem(numbers)  one and the other way round
//   key(numbers)                        the shape class, whose problems share a remembered choice
//   choose(problem), told(choice)       the family's own choice, and a choice as numbers
//   refusal(problem, choice)            why the kernels can't take it, "" where they can
//   make(problem, choice)               the Choice of a legal one
//   candidates(problem)                 every choice there is, the illegal ones too
//   columns(problem, choice)            what a table shows of a choice whose tile there is
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

namespace torchweld {

struct Numbers {
  static constexpr int kMost = 12;
  int count = 0;
  int64_t values[kMost] = {};

  Numbers() = default;
  Numbers(std::initializer_list<int64_t> list) {
    for (const int64_t value : list) push(value);
  }

  void push(int64_t value) { values[count++] = value; }
  int64_t operator[](int i) const { return values[i]; }
  int64_t& operator[](int i) { return values[i]; }

  bool operator==(const Numbers& other) const { return !(*this < other) && !(other < *this); }
  bool operator<(const Numbers& other) const {
    if (count != other.count) return count < other.count;
    for (int i = 0; i < count; ++i) {
      if (values[i] != other.values[i]) return values[i] < other.values[i];
    }
    return false;
  }

  std::string text() const {
    std::string text = "(";
    for (int i = 0; i < count; ++i) text += (i ? ", " : "") + std::to_string(values[i]);
    return text + ")";
  }
};

// A number of a problem. Bounds keep what is read from a file out of the arithmetic's overflow.
struct Field {
  const char* name;
  int64_t least, most;
};
inline constexpr int64_t kMostSize = int64_t{1} << 40;
inline constexpr int64_t kMostSharedBytes = 1 << 24;
inline constexpr int64_t kMostMultiprocessors = 1 << 14;

using Columns = std::vector<std::pair<const char*, int64_t>>;

// Sizes that differ from call to call, such as numbers of rows, stand for the next power of two.
constexpr int64_t size_class(int64_t size) {
  int64_t power = 1;
  while (power < size) power *= 2;
  return size == 0 ? 0 : power;
}

// The blocks of a grid. In floating point: a product of sizes may not fit in 64 bits.
inline bool grid_fits(double blocks) { return blocks <= 2147483647.0; }

template <typename Family>
constexpr int problem_count() {
  return static_cast<int>(sizeof(Family::kProblem) / sizeof(Field));
}
template <typename Family>
constexpr int choice_count() {
  return static_cast<int>(sizeof(Family::kChoice) / sizeof(const char*));
}

// Why these are not the numbers of a problem of the family, "" where they are.
template <typename Family>
std::string problem_refusal(const Numbers& numbers) {
  if (numbers.count != problem_count<Family>()) {
    return std::to_string(problem_count<Family>()) + " numbers";
  }
  for (int i = 0; i < numbers.count; ++i) {
    const Field& field = Family::kProblem[i];
    if (numbers[i] < field.least || numbers[i] > field.most) {
      return field.name + std::string(" from ") + std::to_string(field.least) + " to " +
             std::to_string(field.most);
    }
  }
  return "";
}

inline std::string no_such_tile(int64_t tile, int tiles) {
  return "there is no tile " + std::to_string(tile) + ", there are " + std::to_string(tiles);
}

inline std::string too_much_shared_memory(int64_t bytes, int64_t limit) {
  return "too much shared memory: " + std::to_string(bytes) + " bytes a block, the GPU has " +
         std::to_string(limit);
}

}  // namespace torchweld
