// What torchweld._C tells of the families of kernels that tune knows: their problems, and every
// configuration with why it is refused.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "tuning/families.h"

namespace torchweld {

namespace py = pybind11;

// Calls body(family, problem) with numbers that are known to be a problem of the family.
template <typename Body>
void with_problem(const std::string& name, const std::vector<int64_t>& list, const Body& body) {
  const bool known = Families::visit(name, [&](auto f) {
    using Family = decltype(f);
    Numbers numbers;
    if (list.size() <= Numbers::kMax) {
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

// A choice with why it is refused, "" where it is not.
template <typename Family>
py::dict candidate_dict(const Numbers& problem, const Numbers& choice) {
  const auto call = problem_of<Family>(problem);
  py::dict d, columns;
  for (const auto& [name, value] : Family::columns(call, choice)) columns[name] = value;
  d["choice"] = name_of<Family>(choice);
  d["engine"] = Family::kEngines[choice[0]];
  d["tile"] = Family::tile(choice);
  d["refusal"] = Family::refusal(call, choice).text();
  d["columns"] = columns;
  return d;
}

inline py::list candidates(const std::string& name, const std::vector<int64_t>& problem) {
  py::list all;
  with_problem(name, problem, [&](auto f, const Numbers& numbers) {
    using Family = decltype(f);
    for (const Numbers& choice : Family::candidates(problem_of<Family>(numbers))) {
      all.append(candidate_dict<Family>(numbers, choice));
    }
  });
  return all;
}

inline py::dict candidate(const std::string& name, const std::vector<int64_t>& problem,
                          const std::string& choice) {
  py::dict found;
  with_problem(name, problem, [&](auto f, const Numbers& numbers) {
    using Family = decltype(f);
    for (const Numbers& known : Family::candidates(problem_of<Family>(numbers))) {
      if (name_of<Family>(known) == choice) {
        found = candidate_dict<Family>(numbers, known);
        return;
      }
    }
    throw py::value_error(name + " has no configuration called '" + choice + "'");
  });
  return found;
}

// What a problem takes by itself.
inline py::dict choose(const std::string& name, const std::vector<int64_t>& problem) {
  py::dict found;
  with_problem(name, problem, [&](auto f, const Numbers& numbers) {
    using Family = decltype(f);
    const auto call = problem_of<Family>(numbers);
    found = candidate_dict<Family>(numbers, Family::told(Family::choose(call)));
    found["kernel"] = Family::kernel(call, Family::told(Family::choose(call)));
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
    for (int i = 0; i < field_count<decltype(f)>(); ++i) {
      fields.append(field_of<decltype(f)>(i).name);
    }
    all[f.kName] = fields;
  });
  return all;
}

}  // namespace torchweld
