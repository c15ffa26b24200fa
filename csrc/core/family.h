// What tune, the remembered choices and explain share of a kind of kernel: its problem and its
// choice as plain numbers. Pure host code.
//
// A family is a kind of kernel that has several configurations, described by a struct of statics:
//   kName, kFields, kEngines            its name, the bounds of a problem's numbers, engines' names
//   kInOrder                            whether the first legal candidate is the one to take
//   Problem, Choice                     what its choose function takes and returns
//   numbers(problem), problem(numbers)  one and the other way round, without the device
//   key(numbers)                        the shape class, whose problems share a remembered choice
//   choose(problem), told(choice)       the family's own choice, and a choice as numbers: the
//                                       engine first, then what its tile and parts are
//   candidates(problem)                 every choice there is, the illegal ones too
//   refusal(problem, choice)            why the kernels can't take it
//   make(problem, choice)               the Choice of a legal one
//   tile(choice)                        the tile's name, with its parts; unique within an engine
//   columns(problem, choice)            what a table shows of it
//   kernel(problem, choice), why(...)   explain's words: what runs, and why it is the family's own
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "core/device.h"

namespace torchweld {

struct Numbers {
  static constexpr int kMax = 20;
  int count = 0;
  int64_t values[kMax] = {};

  Numbers() = default;
  Numbers(std::initializer_list<int64_t> list) {
    for (const int64_t value : list) push(value);
  }

  void push(int64_t value) { values[count++] = value; }
  int64_t operator[](int i) const { return values[i]; }
  int64_t& operator[](int i) { return values[i]; }

  bool operator==(const Numbers& other) const {
    if (count != other.count) return false;
    for (int i = 0; i < count; ++i) {
      if (values[i] != other.values[i]) return false;
    }
    return true;
  }
  bool operator!=(const Numbers& other) const { return !(*this == other); }
  bool operator<(const Numbers& other) const {
    if (count != other.count) return count < other.count;
    for (int i = 0; i < count; ++i) {
      if (values[i] != other.values[i]) return values[i] < other.values[i];
    }
    return false;
  }

  // FNV-1a over whole numbers.
  uint64_t hash() const {
    uint64_t hash = 0xcbf29ce484222325;
    for (int i = 0; i < count; ++i)
      hash = (hash ^ static_cast<uint64_t>(values[i])) * 0x100000001b3;
    return hash ^ (hash >> 32);
  }

  std::string text() const {
    std::string text = "(";
    for (int i = 0; i < count; ++i) text += (i ? ", " : "") + std::to_string(values[i]);
    return text + ")";
  }
};

// Why a choice can't serve a problem; nothing where it can. The sentence is put together only where
// somebody reads it, so that choosing may ask too. {} stands for the numbers, in their order.
struct Refusal {
  const char* sentence = nullptr;
  int64_t numbers[2] = {};

  Refusal() = default;
  Refusal(const char* sentence, int64_t first = 0, int64_t second = 0)
      : sentence(sentence), numbers{first, second} {}

  explicit operator bool() const { return sentence != nullptr; }
  std::string text() const {
    std::string text = sentence == nullptr ? "" : sentence;
    for (size_t at = 0, i = 0; i < 2 && (at = text.find("{}", at)) != std::string::npos; ++i) {
      text.replace(at, 2, std::to_string(numbers[i]));
    }
    return text;
  }
};

// A number of a problem. Bounds keep what is read from a file out of the arithmetic's overflow.
struct Field {
  const char* name;
  int64_t least, most;
};
inline constexpr int64_t kMaxSize = int64_t{1} << 40;

// The last numbers of every problem.
inline constexpr Field kDeviceFields[] = {{"sms", 1, 1 << 14}, {"shared_limit", 0, 1 << 24},
                                          {"clusters", 0, 1},  {"clusters_of_16", 0, 1},
                                          {"tma", 0, 1},       {"wgmma", 0, 1}};
inline constexpr int kDeviceFieldCount = sizeof(kDeviceFields) / sizeof(Field);

using Columns = std::vector<std::pair<const char*, int64_t>>;

// Sizes that differ from call to call, such as numbers of rows, stand for the next power of two.
constexpr int64_t size_class(int64_t size) {
  int64_t power = 1;
  while (power < size) power *= 2;
  return size == 0 ? 0 : power;
}

// A family whose problems differ from call to call in their first number.
struct FirstByClass {
  static Numbers key(Numbers x) {
    x[0] = size_class(x[0]);
    return x;
  }
};

// The blocks of a grid. In floating point: a product of sizes may not fit in 64 bits.
inline bool grid_fits(double blocks) { return blocks <= 2147483647.0; }

template <typename Family>
constexpr int field_count() {
  return static_cast<int>(sizeof(Family::kFields) / sizeof(Field)) + kDeviceFieldCount;
}

template <typename Family>
const Field& field_of(int i) {
  const int own = field_count<Family>() - kDeviceFieldCount;
  return i < own ? Family::kFields[i] : kDeviceFields[i - own];
}

template <typename Family>
Numbers numbers_of(const typename Family::Problem& problem) {
  Numbers numbers = Family::numbers(problem);
  const DeviceFacts& d = problem.device;
  for (const int64_t value : {int64_t{d.sms}, int64_t{d.shared_limit}, int64_t{d.clusters},
                              int64_t{d.clusters_of_16}, int64_t{d.tma}, int64_t{d.wgmma}}) {
    numbers.push(value);
  }
  return numbers;
}

template <typename Family>
typename Family::Problem problem_of(const Numbers& numbers) {
  typename Family::Problem problem = Family::problem(numbers);
  const int64_t* d = numbers.values + numbers.count - kDeviceFieldCount;
  problem.device.sms = static_cast<int>(d[0]);
  problem.device.shared_limit = static_cast<int>(d[1]);
  problem.device.clusters = d[2] != 0;
  problem.device.clusters_of_16 = d[3] != 0;
  problem.device.tma = d[4] != 0;
  problem.device.wgmma = d[5] != 0;
  return problem;
}

// A choice by name, as files and people have it: the engine and its tile.
template <typename Family>
std::string name_of(const Numbers& choice) {
  const std::string tile = Family::tile(choice);
  return Family::kEngines[choice[0]] + (tile.empty() ? "" : " " + tile);
}

// Why these are not the numbers of a problem of the family, "" where they are.
template <typename Family>
std::string problem_refusal(const Numbers& numbers) {
  if (numbers.count != field_count<Family>()) {
    return std::to_string(field_count<Family>()) + " numbers";
  }
  for (int i = 0; i < numbers.count; ++i) {
    const Field& field = field_of<Family>(i);
    if (numbers[i] < field.least || numbers[i] > field.most) {
      return field.name + std::string(" from ") + std::to_string(field.least) + " to " +
             std::to_string(field.most);
    }
  }
  return "";
}

// "64x128", and the parts that K is cut into, where there are several.
inline std::string tile_text(int64_t rows, int64_t columns, int64_t parts = 1) {
  return std::to_string(rows) + "x" + std::to_string(columns) +
         (parts > 1 ? " /" + std::to_string(parts) : "");
}

inline Refusal too_much_shared_memory(int64_t bytes, int64_t limit) {
  return {"too much shared memory: {} bytes a block, the GPU has {}", bytes, limit};
}

// Sentences that several families say alike.
inline constexpr const char* kOwnFirst = "the first tile that holds the sizes";
inline constexpr const char* kOwnFastest = "the shortest time by the model beside the tiles";

}  // namespace torchweld
