// What a watched call chose, as tune and explain read it. Pure host code.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "core/family.h"

namespace torchweld {

struct Record {
  std::string family, part, source, choice, kernel, why;
  Numbers problem;
  Columns columns;
  std::vector<std::pair<std::string, std::string>> rejected;  // by name, with the reason
  std::vector<Numbers> kernels;  // registers, shared bytes, threads, local bytes

  std::string json() const;
};

// What was looked at before the choice: of a family whose first legal configuration is taken, all
// of those before it; of one with a model of times, every other engine.
template <typename Family>
std::vector<std::pair<std::string, std::string>> rejected_by(
    const typename Family::Problem& problem, const Numbers& chosen) {
  std::vector<std::pair<std::string, std::string>> rejected;
  if constexpr (Family::kInOrder) {
    for (const Numbers& choice : Family::candidates(problem)) {
      if (choice == chosen) break;
      const Refusal refusal = Family::refusal(problem, choice);
      rejected.emplace_back(name_of<Family>(choice),
                            refusal ? refusal.text() : "others are faster for these sizes");
    }
  } else {
    const std::vector<Numbers> all = Family::candidates(problem);
    constexpr int kEngines = sizeof(Family::kEngines) / sizeof(Family::kEngines[0]);
    for (int engine = 0; engine < kEngines; ++engine) {
      if (engine == chosen[0]) continue;
      std::string reason;
      for (const Numbers& choice : all) {
        if (choice[0] != engine) continue;
        const Refusal refusal = Family::refusal(problem, choice);
        if (!refusal) reason = "slower for these sizes, or no faster";
        if (reason.empty()) reason = refusal.text();
      }
      rejected.emplace_back(Family::kEngines[engine], reason);
    }
  }
  return rejected;
}

template <typename Family>
Record record_of(const Numbers& problem, const Numbers& choice) {
  const auto call = problem_of<Family>(problem);
  Record record;
  record.family = Family::kName;
  record.problem = problem;
  record.choice = name_of<Family>(choice);
  record.kernel = Family::kernel(call, choice);
  record.why = Family::why(call, choice);
  record.columns = Family::columns(call, choice);
  record.rejected = rejected_by<Family>(call, choice);
  return record;
}

// Names and sentences of ours hold no quotes and no control characters.
inline std::string json_text(const std::string& text) { return "\"" + text + "\""; }

inline std::string json_list(const Numbers& numbers) {
  std::string text = numbers.text();
  text.front() = '[';
  text.back() = ']';
  return text;
}

inline std::string Record::json() const {
  const auto split_cluster = [](const auto& list, const auto& text_of) {
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
         ", \"why\": " + json_text(why) + ", \"columns\": {" + split_cluster(columns, column) +
         "}, \"rejected\": [" + split_cluster(rejected, reason) + "], \"kernels\": [" +
         split_cluster(kernels, json_list) + "]}";
}

}  // namespace torchweld
