// Functions with which torchweld._C reports the kernel families: their problems and all their
// configurations. If a configuration is illegal, the report has the reason.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "tuning/families.h"

namespace torchweld {

namespace py = pybind11;

// Checks that `list` is a problem of the family called `name`. Then calls body(family, problem).
template <typename Body>
void with_problem(const std::string& name, const std::vector<int64_t>& list, const Body& body) {
  const bool known = Families::visit(name, [&](auto f) {
    using KernelFamily = decltype(f);
    Encoded numbers;
    if (list.size() <= Encoded::kMax) {
      for (const int64_t value : list) numbers.push(value);
    }
    const std::string refusal = problem_refusal<KernelFamily>(numbers);
    if (!refusal.empty()) {
      throw py::value_error("a problem of " + name + " must be " + refusal + ", but got " +
                            numbers.text());
    }
    body(f, numbers);
  });
  if (!known) throw py::value_error("there is no family of kernels called '" + name + "'");
}

inline py::list as_list(const Encoded& numbers) {
  py::list list;
  for (int i = 0; i < numbers.count; ++i) list.append(numbers[i]);
  return list;
}

// Returns a dict that describes a candidate. If the candidate is legal, its refusal is "".
template <typename KernelFamily>
py::dict candidate_dict(const Encoded& problem, const Encoded& choice) {
  const auto call = decode_problem<KernelFamily>(problem);
  py::dict d, columns;
  for (const auto& [name, value] : KernelFamily::columns(call, choice)) columns[name] = value;
  d["choice"] = name_of<KernelFamily>(choice);
  d["engine"] = KernelFamily::kEngines[choice[0]];
  d["tile"] = KernelFamily::tile(choice);
  d["refusal"] = text_of(KernelFamily::refusal(call, choice));
  d["columns"] = columns;
  return d;
}

inline py::list candidates(const std::string& name, const std::vector<int64_t>& problem) {
  py::list all;
  with_problem(name, problem, [&](auto f, const Encoded& numbers) {
    using KernelFamily = decltype(f);
    for (const Encoded& choice : KernelFamily::candidates(decode_problem<KernelFamily>(numbers))) {
      all.append(candidate_dict<KernelFamily>(numbers, choice));
    }
  });
  return all;
}

inline py::dict candidate(const std::string& name, const std::vector<int64_t>& problem,
                          const std::string& choice) {
  py::dict found;
  with_problem(name, problem, [&](auto f, const Encoded& numbers) {
    using KernelFamily = decltype(f);
    for (const Encoded& known : KernelFamily::candidates(decode_problem<KernelFamily>(numbers))) {
      if (name_of<KernelFamily>(known) == choice) {
        found = candidate_dict<KernelFamily>(numbers, known);
        return;
      }
    }
    throw py::value_error(name + " has no configuration called '" + choice + "'");
  });
  return found;
}

// Returns a dict that describes the choice of the heuristic.
inline py::dict choose(const std::string& name, const std::vector<int64_t>& problem) {
  py::dict found;
  with_problem(name, problem, [&](auto f, const Encoded& numbers) {
    using KernelFamily = decltype(f);
    const auto call = decode_problem<KernelFamily>(numbers);
    found = candidate_dict<KernelFamily>(numbers, KernelFamily::encode(KernelFamily::choose(call)));
    found["kernel"] = KernelFamily::kernel(call, KernelFamily::encode(KernelFamily::choose(call)));
  });
  return found;
}

inline py::list shape_class(const std::string& name, const std::vector<int64_t>& problem) {
  py::list encoded;
  with_problem(name, problem, [&](auto f, const Encoded& numbers) {
    encoded = as_list(decltype(f)::shape_class(numbers));
  });
  return encoded;
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
