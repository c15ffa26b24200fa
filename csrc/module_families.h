// What torchweld._C tells of the families of kernels that tune knows: their problems, and every
// configuration with why it is refused.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "core/families.h"

namespace torchweld {

namespace py = pybind11;

// Calls body(family, problem) with numbers that are known to be a problem of the family.
template <typename Body>
void with_problem(const std::string& name, const std::vector<int64_t>& list, const Body& body) {
  const bool known = Families::visit(name, [&](auto f) {
    using Family = decltype(f);
    Numbers numbers;
    if (list.size() <= Numbers::kMost) {
      for (const int64_t value : list) numbers.push(value);
    }
    const std::string refusal = problem_refusal<Family>(numbers);
    if (!refusal.empty()) {
      throw py::value_error("a problem of " + name + " must be " + refusal + ", but got " +
                            numbers.text());
    }
    body(f, numbers);
  });
  if (!known) throw py::value_error("there is no family of kernels called '" + name + "'");
}

inline py::list as_list(const Numbers& numbers) {
  py::list list;
  for (int i = 0; i < numbers.count; ++i) list.append(numbers[i]);
  return list;
}

// A choice with why it is refused, "" where it is not, and its columns, {} where it has none.
template <typename Family>
py::dict candidate_dict(const Numbers& problem, const Numbers& choice) {
  const auto call = Family::problem(problem);
  const std::string refusal = Family::refusal(call, choice);
  py::dict d, columns;
  if (refusal.rfind("there is no ", 0) != 0) {
    for (const auto& [name, value] : Family::columns(call, choice)) columns[name] = value;
  }
  d["choice"] = as_list(choice);
  d["refusal"] = refusal;
  d["columns"] = columns;
  return d;
}

inline py::list candidates(const std::string& name, const std::vector<int64_t>& problem) {
  py::list all;
  with_problem(name, problem, [&](auto f, const Numbers& numbers) {
    using Family = decltype(f);
    for (const Numbers& choice : Family::candidates(Family::problem(numbers))) {
      all.append(candidate_dict<Family>(numbers, choice));
    }
  });
  return all;
}

inline py::dict candidate(const std::string& name, const std::vector<int64_t>& problem,
                          const std::vector<int64_t>& list) {
  py::dict found;
  with_problem(name, problem, [&](auto f, const Numbers& numbers) {
    using Family = decltype(f);
    if (list.size() != size_t(choice_count<Family>())) {
      throw py::value_error("a choice of " + name + " must be " +
                            std::to_string(choice_count<Family>()) + " numbers, but got " +
                            std::to_string(list.size()));
    }
    Numbers choice;
    for (const int64_t value : list) choice.push(value);
    found = candidate_dict<Family>(numbers, choice);
  });
  return found;
}

inline py::list shape_class(const std::string& name, const std::vector<int64_t>& problem) {
  py::list key;
  with_problem(name, problem,
               [&](auto f, const Numbers& numbers) { key = as_list(decltype(f)::key(numbers)); });
  return key;
}

inline py::dict families() {
  py::dict all;
  Families::each([&](auto f) {
    py::list fields;
    for (const Field& field : f.kProblem) fields.append(field.name);
    all[f.kName] = fields;
  });
  return all;
}

}  // namespace torchweld
