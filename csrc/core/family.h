// A KernelFamily is a group of kernels that solve one kind of problem. The family encodes problems
// and choices (engine, tile and splits) as integers. tune, explain and the remembered choices use
// these integers. This is pure host code.
//
// A family is a struct with these static members:
//   kName, kFields, kEngines        its name, the bounds of a problem's fields, the engines' names
//   kFirstLegal                     whether choose() returns the first legal candidate
//   Problem, Choice                 the argument and the result of choose()
//   encode_fields(problem), decode_fields(encoded)   convert all fields except those of the device
//   shape_class(encoded)            the problem under which tune remembers its choice
//   choose(problem)                 the heuristic choice
//   encode(choice)                  the engine, then the tile and the number of splits
//   candidates(problem)             every choice that tune lists, legal or not
//   refusal(problem, encoded)       why the kernels do not support the choice
//   make(problem, encoded)          the Choice of a legal candidate
//   tile(encoded)                   the tile's name with its splits; unique within an engine
//   columns(problem, encoded)       the columns of tune's table
//   kernel(problem, encoded), why(problem, encoded)   the sentences of explain
#pragma once

#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/device.h"
#include "core/refusal.h"

namespace torchweld {

struct Encoded {
  static constexpr int kMax = 24;
  int count = 0;
  int64_t values[kMax] = {};

  Encoded() = default;
  Encoded(std::initializer_list<int64_t> list) {
    for (const int64_t value : list) push(value);
  }

  void push(int64_t value) {
    if (count == kMax) throw std::length_error("torchweld: Encoded::kMax is too small");
    values[count++] = value;
  }
  int64_t operator[](int i) const { return values[i]; }
  int64_t& operator[](int i) { return values[i]; }

  bool operator==(const Encoded& other) const {
    if (count != other.count) return false;
    for (int i = 0; i < count; ++i) {
      if (values[i] != other.values[i]) return false;
    }
    return true;
  }
  bool operator!=(const Encoded& other) const { return !(*this == other); }
  bool operator<(const Encoded& other) const {
    if (count != other.count) return count < other.count;
    for (int i = 0; i < count; ++i) {
      if (values[i] != other.values[i]) return values[i] < other.values[i];
    }
    return false;
  }

  // Returns an FNV-1a hash that processes whole integers instead of bytes.
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

// Returns the sentence of a refusal, or "" if there is none.
inline std::string text_of(const Refusal& refusal) {
  std::string text = refusal.sentence == nullptr ? "" : refusal.sentence;
  for (size_t found = 0, i = 0; i < 2 && (found = text.find("{}", found)) != std::string::npos;
       ++i) {
    text.replace(found, 2, std::to_string(refusal.values[i]));
  }
  return text;
}

// A field of an encoded problem. Values that are read from a file must lie within the bounds, so
// that later arithmetic does not overflow.
struct Field {
  const char* name;
  int64_t min, max;
};
inline constexpr int64_t kMaxSize = int64_t{1} << 40;

// The last fields of every encoded problem.
inline constexpr Field kDeviceFields[] = {{"sms", 1, 1 << 14}, {"shared_limit", 0, 1 << 24},
                                          {"clusters", 0, 1},  {"clusters_of_16", 0, 1},
                                          {"tma", 0, 1},       {"wgmma", 0, 1}};
inline constexpr int kDeviceFieldCount = sizeof(kDeviceFields) / sizeof(Field);

using Columns = std::vector<std::pair<const char*, int64_t>>;

// Base class of the families whose first problem field is a size that varies between calls.
struct FirstSizeByClass {
  static Encoded shape_class(Encoded x) {
    x[0] = size_class(x[0]);
    return x;
  }
};

template <typename KernelFamily>
constexpr int field_count() {
  return static_cast<int>(sizeof(KernelFamily::kFields) / sizeof(Field)) + kDeviceFieldCount;
}

template <typename KernelFamily>
const Field& field_of(int i) {
  const int fields = field_count<KernelFamily>() - kDeviceFieldCount;
  return i < fields ? KernelFamily::kFields[i] : kDeviceFields[i - fields];
}

template <typename KernelFamily>
Encoded encode_problem(const typename KernelFamily::Problem& problem) {
  Encoded encoded = KernelFamily::encode_fields(problem);
  const DeviceFacts& d = problem.device;
  for (const int64_t value : {int64_t{d.sms}, int64_t{d.shared_limit}, int64_t{d.clusters},
                              int64_t{d.clusters_of_16}, int64_t{d.tma}, int64_t{d.wgmma}}) {
    encoded.push(value);
  }
  return encoded;
}

// Sets active_clusters from the other facts, because an encoded problem does not contain it. The
// numbers of an H100 are known. For another GPU, the result ignores that the blocks of a cluster
// share a GPC.
inline void estimate_active_clusters(DeviceFacts& d) {
  constexpr int kMaxSize = sizeof(d.active_clusters) / sizeof(int) - 1;
  for (int size = 1; size <= kMaxSize; ++size) {
    const bool supported = size == 1 || (d.clusters && (size <= 8 || d.clusters_of_16));
    d.active_clusters[size] = !supported                ? 0
                              : d.sms == kH100Facts.sms ? kH100Facts.active_clusters[size]
                                                        : d.sms / size;
  }
}

template <typename KernelFamily>
typename KernelFamily::Problem decode_problem(const Encoded& encoded) {
  typename KernelFamily::Problem problem = KernelFamily::decode_fields(encoded);
  const int64_t* d = encoded.values + encoded.count - kDeviceFieldCount;
  problem.device.sms = static_cast<int>(d[0]);
  problem.device.shared_limit = static_cast<int>(d[1]);
  problem.device.clusters = d[2] != 0;
  problem.device.clusters_of_16 = d[3] != 0;
  problem.device.tma = d[4] != 0;
  problem.device.wgmma = d[5] != 0;
  estimate_active_clusters(problem.device);
  return problem;
}

// Returns the name of a choice in files and messages. The name consists of the engine and the tile.
template <typename KernelFamily>
std::string name_of(const Encoded& choice) {
  const std::string tile = KernelFamily::tile(choice);
  return KernelFamily::kEngines[choice[0]] + (tile.empty() ? "" : " " + tile);
}

// Returns why `encoded` is not a valid problem of the family, or "" if it is valid.
template <typename KernelFamily>
std::string problem_refusal(const Encoded& encoded) {
  if (encoded.count != field_count<KernelFamily>()) {
    return std::to_string(field_count<KernelFamily>()) + " numbers";
  }
  for (int i = 0; i < encoded.count; ++i) {
    const Field& field = field_of<KernelFamily>(i);
    if (encoded[i] < field.min || encoded[i] > field.max) {
      return field.name + std::string(" from ") + std::to_string(field.min) + " to " +
             std::to_string(field.max);
    }
  }
  return "";
}

// Returns the text of a tile, for example "64x128", or "64x128 /4" with four splits of K.
inline std::string tile_text(int64_t rows, int64_t columns, int64_t splits = 1) {
  return std::to_string(rows) + "x" + std::to_string(columns) +
         (splits > 1 ? " /" + std::to_string(splits) : "");
}

// Sentences that the function why() of several kernel families returns.
inline constexpr const char* kWhyFirstLegal = "the first tile that holds the sizes";
inline constexpr const char* kWhyFastest = "the shortest time by the model beside the tiles";

}  // namespace torchweld
