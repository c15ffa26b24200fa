// The records of an observed call, which tune and explain read. This is pure host code.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "core/family.h"

namespace torchweld {

struct Record {
  std::string family, part, source, choice, kernel, why;
  Encoded problem;
  Columns columns;
  // The name of each rejected choice, and the reason why it was rejected.
  std::vector<std::pair<std::string, std::string>> rejected;
  // One entry for each launch. An entry lists five numbers: the registers per thread, the bytes of
  // shared memory, the threads per block, the bytes of local memory, and the offset of the kernel's
  // host function in the library.
  std::vector<Encoded> kernels;

  std::string json() const;
};

// Returns the rejected alternatives to a choice. If the family chooses the first legal candidate,
// the alternatives are the candidates before the choice. Otherwise the alternatives are the other
// engines.
template <typename KernelFamily>
std::vector<std::pair<std::string, std::string>> rejected_by(
    const typename KernelFamily::Problem& problem, const Encoded& chosen) {
  std::vector<std::pair<std::string, std::string>> rejected;
  if constexpr (KernelFamily::kFirstLegal) {
    for (const Encoded& choice : KernelFamily::candidates(problem)) {
      if (choice == chosen) break;
      const Refusal refusal = KernelFamily::refusal(problem, choice);
      rejected.emplace_back(name_of<KernelFamily>(choice),
                            refusal ? text_of(refusal) : "others are faster for these sizes");
    }
  } else {
    const std::vector<Encoded> all = KernelFamily::candidates(problem);
    constexpr int kEngines = sizeof(KernelFamily::kEngines) / sizeof(KernelFamily::kEngines[0]);
    for (int engine = 0; engine < kEngines; ++engine) {
      if (engine == chosen[0]) continue;
      std::string reason;
      for (const Encoded& choice : all) {
        if (choice[0] != engine) continue;
        const Refusal refusal = KernelFamily::refusal(problem, choice);
        if (!refusal) reason = "slower for these sizes, or no faster";
        if (reason.empty()) reason = text_of(refusal);
      }
      rejected.emplace_back(KernelFamily::kEngines[engine], reason);
    }
  }
  return rejected;
}

template <typename KernelFamily>
Record record_of(const Encoded& problem, const Encoded& choice) {
  const auto call = decode_problem<KernelFamily>(problem);
  Record record;
  record.family = KernelFamily::kName;
  record.problem = problem;
  record.choice = name_of<KernelFamily>(choice);
  record.kernel = KernelFamily::kernel(call, choice);
  record.why = KernelFamily::why(call, choice);
  record.columns = KernelFamily::columns(call, choice);
  record.rejected = rejected_by<KernelFamily>(call, choice);
  return record;
}

// Names and sentences contain no quotes and no control characters, so they need no escaping.
inline std::string json_text(const std::string& text) { return "\"" + text + "\""; }

inline std::string json_list(const Encoded& numbers) {
  std::string text = numbers.text();
  text.front() = '[';
  text.back() = ']';
  return text;
}

inline std::string Record::json() const {
  const auto join_texts = [](const auto& list, const auto& text_of) {
    std::string text;
    for (const auto& item : list) text += (text.empty() ? "" : ", ") + text_of(item);
    return text;
  };
  const auto column = [](const std::pair<const char*, int64_t>& c) {
    return json_text(c.first) + ": " + std::to_string(c.second);
  };
  const auto reason = [](const std::pair<std::string, std::string>& r) {
    return "[" + json_text(r.first) + ", " + json_text(r.second) + "]";
  };
  return "{\"family\": " + json_text(family) + ", \"part\": " + json_text(part) +
         ", \"source\": " + json_text(source) + ", \"problem\": " + json_list(problem) +
         ", \"choice\": " + json_text(choice) + ", \"kernel\": " + json_text(kernel) +
         ", \"why\": " + json_text(why) + ", \"columns\": {" + join_texts(columns, column) +
         "}, \"rejected\": [" + join_texts(rejected, reason) + "], \"kernels\": [" +
         join_texts(kernels, json_list) + "]}";
}

}  // namespace torchweld
