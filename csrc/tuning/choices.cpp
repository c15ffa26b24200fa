// The tables behind `pick`, and the private ops by which torchweld.tune and torchweld.explain fill
// and watch them.
//
// Forced choices and the watch belong to a thread, remembered ones to the process; these are kept
// by the GPU's name, so that they can be read from a file before any GPU is touched. A remembered
// choice serves a whole shape class, so it is checked against every problem again and left alone
// where it does not fit. Outside of the library choices go by name.
#include "core/choices.h"

#include <torch/library.h>

#include <map>
#include <mutex>
#include <shared_mutex>

#include "core/check.h"
#include "tuning/families.h"
#include "tuning/record.h"

#ifdef TORCHWELD_CUDA
#include <cuda_runtime_api.h>
#endif

namespace torchweld {

std::atomic<int> choices_in_use{0};

namespace {

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

struct ThreadState {
  std::map<Key, Numbers> forced;
  bool watching = false;
  bool dry = false;                  // watched calls launch nothing
  DeviceFacts assumed = kH100Facts;  // of a dry run
  std::string assumed_gpu;           // its name, "" where there is none
  const char* part = "";
  std::vector<Record> records;

  ~ThreadState() { choices_in_use -= int(!forced.empty()) + int(watching); }
};
thread_local ThreadState this_thread;

// The name of the device that runs or, in a dry run, is assumed; "" where there is none.
std::string current_gpu() {
  if (is_dry_run()) return this_thread.assumed_gpu;
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
    const Refusal refusal = Family::refusal(problem_of<Family>(problem), forced->second);
    TW_CHECK(!refusal, Family::kName,
             "the forced choice must be one that the problem allows, but got '",
             name_of<Family>(forced->second), "' for ", problem.text(), ": ", refusal.text(),
             "; torchweld.tune lists those there are");
    return {forced->second, "forced"};
  }
  Numbers found;
  if (find_remembered(gpu ? *gpu : current_gpu(), key, &found) &&
      !Family::refusal(problem_of<Family>(problem), found)) {
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

Numbers numbers_from(const char* op, at::IntArrayRef list) {
  TW_CHECK(list.size() <= size_t{Numbers::kMax}, op, "problem must be at most ", Numbers::kMax,
           " numbers, but got ", list.size());
  Numbers numbers;
  for (const int64_t value : list) numbers.push(value);
  return numbers;
}

template <typename Family>
Numbers checked_problem(const char* op, at::IntArrayRef list) {
  const Numbers problem = numbers_from(op, list);
  const std::string refusal = problem_refusal<Family>(problem);
  TW_CHECK(refusal.empty(), op, "problem must be ", refusal, " for ", Family::kName, ", but got ",
           problem.text());
  return problem;
}

template <typename Family>
Numbers checked_choice(const char* op, const Numbers& problem, const std::string& name) {
  const auto call = problem_of<Family>(problem);
  for (const Numbers& choice : Family::candidates(call)) {
    if (name_of<Family>(choice) != name) continue;
    const Refusal refusal = Family::refusal(call, choice);
    TW_CHECK(!refusal, op, "choice must be one that the problem allows, but got '", name, "' for ",
             problem.text(), ": ", refusal.text());
    return choice;
  }
  TW_CHECK(false, op, "choice must be the name of a configuration of ", Family::kName,
           ", but got '", name, "'; torchweld._C.candidates lists them");
}

// An empty choice takes back what was forced.
void force_choice(std::string family, at::IntArrayRef problem, std::string choice) {
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
                     std::string choice) {
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
std::tuple<std::string, std::string> picked_choice(std::string gpu, std::string family,
                                                   at::IntArrayRef problem) {
  const char* op = "_picked_choice";
  std::tuple<std::string, std::string> picked;
  visit_family(op, family, [&](auto f) {
    using Family = decltype(f);
    const Numbers checked = checked_problem<Family>(op, problem);
    const Numbers own = Family::told(Family::choose(problem_of<Family>(checked)));
    const Resolved resolved = resolve<Family>(&gpu, checked, own);
    picked = {name_of<Family>(resolved.choice), resolved.source};
  });
  return picked;
}

void watch(bool on) {
  ThreadState& state = this_thread;
  choices_in_use += int(on) - int(state.watching);
  state.watching = on;
  state.records.clear();
}

// Starts the watch of this thread.
void begin_watch() {
  this_thread.dry = false;
  watch(true);
}

// The same for a dry run: of the GPU of that number, or, below 0, of an H100.
void begin_dry_run(int64_t device) {
  ThreadState& state = this_thread;
  state.dry = false;
  state.assumed = kH100Facts;
  state.assumed_gpu.clear();
#ifdef TORCHWELD_CUDA
  if (device >= 0) {
    int before = 0;
    TW_CHECK(cudaGetDevice(&before) == cudaSuccess &&
                 cudaSetDevice(static_cast<int>(device)) == cudaSuccess,
             "_begin_dry_run", "device must be the number of a GPU, but got ", device);
    state.assumed = device_facts();
    state.assumed_gpu = current_gpu();
    (void)cudaSetDevice(before);
  }
#endif
  state.dry = true;
  watch(true);
}

// Ends the watch; what was seen, a JSON object each.
std::vector<std::string> end_watch() {
  std::vector<std::string> seen;
  for (const Record& record : this_thread.records) seen.push_back(record.json());
  this_thread.dry = false;
  watch(false);
  return seen;
}

TORCH_LIBRARY_FRAGMENT(torchweld, m) {
  m.def("_force_choice(str family, int[] problem, str choice) -> ()", &force_choice);
  m.def("_remember_choice(str gpu, str family, int[] problem, str choice) -> ()", &remember_choice);
  m.def("_forget_choices() -> ()", &forget_choices);
  m.def("_picked_choice(str gpu, str family, int[] problem) -> (str choice, str source)",
        &picked_choice);
  m.def("_begin_watch() -> ()", &begin_watch);
  m.def("_begin_dry_run(int device) -> ()", &begin_dry_run);
  m.def("_end_watch() -> str[]", &end_watch);
}

}  // namespace

bool this_thread_runs_dry() { return this_thread.dry; }

const DeviceFacts* assumed_device_facts() { return &this_thread.assumed; }

const char* CallPart::exchange(const char* name) {
  const char* const before = this_thread.part;
  this_thread.part = name;
  return before;
}

Numbers resolve_choice(const char* family, const Numbers& problem, const Numbers& own) {
  Resolved resolved = {own, "heuristic"};
  Families::visit(family, [&](auto f) {
    using Family = decltype(f);
    resolved = resolve<Family>(nullptr, problem, own);
    ThreadState& state = this_thread;
    if (!state.watching) return;
    state.records.push_back(record_of<Family>(problem, resolved.choice));
    state.records.back().source = resolved.source;
    state.records.back().part = state.part;
  });
  return resolved.choice;
}

void observe_launch(const void* kernel, int threads, int dynamic_shared_bytes) {
#ifdef TORCHWELD_CUDA
  ThreadState& state = this_thread;
  if (!state.watching) return;
  if (state.records.empty()) state.records.emplace_back();  // of no family
  cudaFuncAttributes attributes = {};
  if (!state.dry && cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess) {
    (void)cudaGetLastError();  // the launch tells what is wrong
    return;
  }
  state.records.back().kernels.push_back(
      {attributes.numRegs, static_cast<int64_t>(attributes.sharedSizeBytes) + dynamic_shared_bytes,
       threads, static_cast<int64_t>(attributes.localSizeBytes)});
#endif
}

}  // namespace torchweld
