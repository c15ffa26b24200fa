// The tables behind `pick`, and the private ops by which torchweld.tune fills and watches them.
//
// Forced choices and the watch belong to a thread, remembered ones to the process; these are kept
// by the GPU's name, so that they can be read from a file before any GPU is touched. A remembered
// choice serves a whole shape class, so it is checked against every problem again and left alone
// where it does not fit.
#include "core/choices.h"

#include <torch/library.h>

#include <map>
#include <mutex>
#include <shared_mutex>

#include "core/check.h"
#include "core/families.h"

#ifdef TORCHWELD_CUDA
#include <cuda_runtime_api.h>

#include <array>

#include "core/launch.h"
#endif

namespace torchweld {

std::atomic<int> choices_in_use{0};

namespace {

using Ints = std::vector<int64_t>;
using Key = std::pair<std::string, Numbers>;  // family, shape class

struct Remembered {
  std::shared_mutex mutex;
  std::map<std::string, std::map<Key, Numbers>> by_gpu;
};
// NOTE: never destroyed, because threads may still run kernels while the process ends.
Remembered& remembered() {
  static Remembered* const table = new Remembered;
  return *table;
}

struct Watched {
  std::string family, source;
  Numbers problem, choice;
  std::vector<Numbers> kernels;  // registers, shared bytes, threads, local bytes
};

struct ThreadState {
  std::map<Key, Numbers> forced;
  bool watching = false;
  std::vector<Watched> watched;

  ~ThreadState() { choices_in_use -= int(!forced.empty()) + int(watching); }
};
thread_local ThreadState this_thread;

// The current device's name, "" where there is none.
std::string current_gpu() {
#ifdef TORCHWELD_CUDA
  static std::mutex mutex;
  static std::map<int, std::string>* const names = new std::map<int, std::string>;
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) {
    (void)cudaGetLastError();  // the launch tells what is wrong
    return "";
  }
  const std::lock_guard<std::mutex> lock(mutex);
  const auto known = names->find(device);
  if (known != names->end()) return known->second;
  cudaDeviceProp properties;
  if (cudaGetDeviceProperties(&properties, device) != cudaSuccess) {
    (void)cudaGetLastError();
    return "";
  }
  return (*names)[device] = properties.name;
#else
  return "";
#endif
}

bool find_remembered(const std::string& gpu, const Key& key, Numbers* choice) {
  Remembered& table = remembered();
  const std::shared_lock<std::shared_mutex> lock(table.mutex);
  const auto of_gpu = table.by_gpu.find(gpu);
  if (of_gpu == table.by_gpu.end()) return false;
  const auto found = of_gpu->second.find(key);
  if (found == of_gpu->second.end()) return false;
  *choice = found->second;
  return true;
}

struct Resolved {
  Numbers choice;
  const char* source;
};

// gpu is nullptr for the current device.
template <typename Family>
Resolved resolve(const std::string* gpu, const Numbers& problem, const Numbers& own) {
  const Key key = {Family::kName, Family::key(problem)};
  const auto forced = this_thread.forced.find(key);
  if (forced != this_thread.forced.end()) {
    const std::string refusal = Family::refusal(Family::problem(problem), forced->second);
    TW_CHECK(refusal.empty(), Family::kName,
             "the forced choice must be one that the problem allows, but got ",
             forced->second.text(), " for ", problem.text(), ": ", refusal,
             "; torchweld.tune lists those there are");
    return {forced->second, "forced"};
  }
  Numbers found;
  if (find_remembered(gpu ? *gpu : current_gpu(), key, &found) &&
      Family::refusal(Family::problem(problem), found).empty()) {
    return {found, "tuned"};
  }
  return {own, "heuristic"};
}

// Calls body with the family of that name, or refuses the name.
template <typename Body>
void visit_family(const char* op, const std::string& name, const Body& body) {
  std::string names;
  Families::each(
      [&](auto family) { names += (names.empty() ? "" : ", ") + std::string(family.kName); });
  TW_CHECK(Families::visit(name, body), op, "family must be one of ", names, ", but got '", name,
           "'");
}

Numbers numbers_of(const char* op, const char* name, at::IntArrayRef list) {
  TW_CHECK(list.size() <= size_t{Numbers::kMost}, op, name, " must be at most ", Numbers::kMost,
           " numbers, but got ", list.size());
  Numbers numbers;
  for (const int64_t value : list) numbers.push(value);
  return numbers;
}

template <typename Family>
Numbers checked_problem(const char* op, at::IntArrayRef list) {
  const Numbers problem = numbers_of(op, "problem", list);
  const std::string refusal = problem_refusal<Family>(problem);
  TW_CHECK(refusal.empty(), op, "problem must be ", refusal, " for ", Family::kName, ", but got ",
           problem.text());
  return problem;
}

template <typename Family>
Numbers checked_choice(const char* op, const Numbers& problem, at::IntArrayRef list) {
  const Numbers choice = numbers_of(op, "choice", list);
  TW_CHECK(choice.count == choice_count<Family>(), op, "choice must be ", choice_count<Family>(),
           " numbers for ", Family::kName, ", but got ", choice.text());
  const std::string refusal = Family::refusal(Family::problem(problem), choice);
  TW_CHECK(refusal.empty(), op, "choice must be one that the problem allows, but got ",
           choice.text(), " for ", problem.text(), ": ", refusal);
  return choice;
}

Ints as_list(const Numbers& numbers) { return {numbers.values, numbers.values + numbers.count}; }

// An empty choice takes back what was forced.
void force_choice(std::string family, at::IntArrayRef problem, at::IntArrayRef choice) {
  const char* op = "_force_choice";
  visit_family(op, family, [&](auto f) {
    using Family = decltype(f);
    const Numbers checked = checked_problem<Family>(op, problem);
    const Key key = {Family::kName, Family::key(checked)};
    auto& forced = this_thread.forced;
    const bool was_used = !forced.empty();
    if (choice.empty()) {
      forced.erase(key);
    } else {
      forced[key] = checked_choice<Family>(op, checked, choice);
    }
    choices_in_use += int(!forced.empty()) - int(was_used);
  });
}

void remember_choice(std::string gpu, std::string family, at::IntArrayRef problem,
                     at::IntArrayRef choice) {
  const char* op = "_remember_choice";
  visit_family(op, family, [&](auto f) {
    using Family = decltype(f);
    const Numbers checked = checked_problem<Family>(op, problem);
    const Numbers chosen = checked_choice<Family>(op, checked, choice);
    Remembered& table = remembered();
    const std::unique_lock<std::shared_mutex> lock(table.mutex);
    const bool was_used = !table.by_gpu.empty();
    table.by_gpu[gpu][{Family::kName, Family::key(checked)}] = chosen;
    if (!was_used) ++choices_in_use;
  });
}

void forget_choices() {
  Remembered& table = remembered();
  const std::unique_lock<std::shared_mutex> lock(table.mutex);
  if (!table.by_gpu.empty()) --choices_in_use;
  table.by_gpu.clear();
}

// What a call takes on the GPU of that name, and by whose choice.
std::tuple<Ints, std::string> picked_choice(std::string gpu, std::string family,
                                            at::IntArrayRef problem) {
  const char* op = "_picked_choice";
  std::tuple<Ints, std::string> picked;
  visit_family(op, family, [&](auto f) {
    using Family = decltype(f);
    const Numbers checked = checked_problem<Family>(op, problem);
    const Numbers own = Family::told(Family::choose(Family::problem(checked)));
    const Resolved resolved = resolve<Family>(&gpu, checked, own);
    picked = {as_list(resolved.choice), resolved.source};
  });
  return picked;
}

// Starts or ends the watch of this thread; ends with what was seen, a JSON object each.
std::vector<std::string> watch_choices(bool on) {
  ThreadState& state = this_thread;
  choices_in_use += int(on) - int(state.watching);
  state.watching = on;
  std::vector<std::string> seen;
  const auto list = [](const Numbers& numbers) {
    std::string text = numbers.text();
    text.front() = '[';
    text.back() = ']';
    return text;
  };
  for (const Watched& w : state.watched) {
    std::string kernels;
    for (const Numbers& k : w.kernels) kernels += (kernels.empty() ? "" : ", ") + list(k);
    seen.push_back("{\"family\": \"" + w.family + "\", \"source\": \"" + w.source +
                   "\", \"problem\": " + list(w.problem) + ", \"choice\": " + list(w.choice) +
                   ", \"kernels\": [" + kernels + "]}");
  }
  state.watched.clear();
  return seen;
}

// For explain, which makes the launchers' choice without a launch.
bool fits_clusters_of_16() {
#ifdef TORCHWELD_CUDA
  return device_fits_clusters_of_16();
#else
  return false;
#endif
}

TORCH_LIBRARY_FRAGMENT(torchweld, m) {
  m.def("_force_choice(str family, int[] problem, int[] choice) -> ()", &force_choice);
  m.def("_remember_choice(str gpu, str family, int[] problem, int[] choice) -> ()",
        &remember_choice);
  m.def("_forget_choices() -> ()", &forget_choices);
  m.def("_picked_choice(str gpu, str family, int[] problem) -> (int[] choice, str source)",
        &picked_choice);
  m.def("_watch_choices(bool on) -> str[]", &watch_choices);
  m.def("_fits_clusters_of_16() -> bool", &fits_clusters_of_16);
}

}  // namespace

Numbers resolve_choice(const char* family, const Numbers& problem, const Numbers& own) {
  Resolved resolved = {own, "heuristic"};
  Families::visit(family, [&](auto f) { resolved = resolve<decltype(f)>(nullptr, problem, own); });
  ThreadState& state = this_thread;
  if (state.watching) {
    state.watched.push_back({family, resolved.source, problem, resolved.choice, {}});
  }
  return resolved.choice;
}

void watch_kernel(const void* kernel, int threads, int dynamic_shared_bytes) {
#ifdef TORCHWELD_CUDA
  ThreadState& state = this_thread;
  if (!state.watching || state.watched.empty()) return;
  cudaFuncAttributes attributes = {};
  if (cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess) {
    (void)cudaGetLastError();  // the launch tells what is wrong
    return;
  }
  state.watched.back().kernels.push_back(
      {attributes.numRegs, static_cast<int64_t>(attributes.sharedSizeBytes) + dynamic_shared_bytes,
       threads, static_cast<int64_t>(attributes.localSizeBytes)});
#endif
}

}  // namespace torchweld
