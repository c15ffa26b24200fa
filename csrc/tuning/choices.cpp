// The tables of choices that pick() reads, and private ops that access the tables. torchweld.tune
// and torchweld.explain call these ops.
//
// Forced choices and observation belong to a thread. Remembered choices belong to the process and
// to the name of a GPU. Therefore a file of remembered choices can be read before CUDA is
// initialised. A remembered choice covers a shape class. For a problem of this class that the
// choice does not support, pick() ignores the choice. Outside of the library, a choice is
// identified by its name.
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
#include <dlfcn.h>
#endif

namespace torchweld {

std::atomic<int> choices_in_use{0};

namespace {

// The name of the kernel family, and the shape class of the problem.
using Key = std::pair<std::string, Encoded>;

struct Remembered {
  std::shared_mutex mutex;
  std::map<std::string, std::map<Key, Encoded>> by_gpu;
};
// NOTE: the table is never destroyed, because threads may still run kernels while the process ends.
Remembered& remembered() {
  static Remembered* const table = new Remembered;
  return *table;
}

struct ThreadState {
  std::map<Key, Encoded> forced;
  bool observing = false;
  bool dry_run = false;              // true in a dry run: observed calls launch nothing
  DeviceFacts assumed = kH100Facts;  // the facts of the GPU that a dry run assumes
  std::string assumed_gpu;           // the name of the assumed GPU, or "" if it has no name
  const char* part = "";
  std::vector<Record> records;

  ~ThreadState() { choices_in_use -= int(!forced.empty()) + int(observing); }
};
thread_local ThreadState this_thread;

// Returns the name of the current GPU, or "" if there is no GPU. In a dry run, returns the name of
// the assumed GPU.
std::string current_gpu() {
  if (is_dry_run()) return this_thread.assumed_gpu;
#ifdef TORCHWELD_CUDA
  static std::mutex mutex;
  static std::map<int, std::string>* const names = new std::map<int, std::string>;
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) {
    (void)cudaGetLastError();  // the launch will report the error
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

bool find_remembered(const std::string& gpu, const Key& key, Encoded* choice) {
  Remembered& table = remembered();
  const std::shared_lock<std::shared_mutex> lock(table.mutex);
  const auto on_gpu = table.by_gpu.find(gpu);
  if (on_gpu == table.by_gpu.end()) return false;
  const auto found = on_gpu->second.find(key);
  if (found == on_gpu->second.end()) return false;
  *choice = found->second;
  return true;
}

struct Resolved {
  Encoded choice;
  const char* source;
};

// Returns the forced choice of a problem, if there is one. Otherwise, if there is a remembered
// choice for `gpu`, returns that choice. Otherwise returns `heuristic`. If `gpu` is null, the name
// of the current GPU replaces it.
template <typename KernelFamily>
Resolved resolve(const std::string* gpu, const Encoded& problem, const Encoded& heuristic) {
  const Key key = {KernelFamily::kName, KernelFamily::shape_class(problem)};
  const auto forced = this_thread.forced.find(key);
  if (forced != this_thread.forced.end()) {
    const Refusal refusal =
        KernelFamily::refusal(decode_problem<KernelFamily>(problem), forced->second);
    TW_CHECK(!refusal, KernelFamily::kName,
             "the forced choice must be one that the problem allows, but got '",
             name_of<KernelFamily>(forced->second), "' for ", problem.text(), ": ",
             text_of(refusal), "; torchweld.tune lists the legal ones");
    return {forced->second, "forced"};
  }
  Encoded found;
  if (find_remembered(gpu ? *gpu : current_gpu(), key, &found) &&
      !KernelFamily::refusal(decode_problem<KernelFamily>(problem), found)) {
    return {found, "tuned"};
  }
  return {heuristic, "heuristic"};
}

// Calls body with the family called `name`. Raises an error if there is no such family.
template <typename Body>
void visit_family(const char* op, const std::string& name, const Body& body) {
  std::string names;
  Families::each(
      [&](auto family) { names += (names.empty() ? "" : ", ") + std::string(family.kName); });
  TW_CHECK(Families::visit(name, body), op, "family must be one of ", names, ", but got '", name,
           "'");
}

Encoded encoded_from(const char* op, at::IntArrayRef list) {
  TW_CHECK(list.size() <= size_t{Encoded::kMax}, op, "problem must be at most ", Encoded::kMax,
           " numbers, but got ", list.size());
  Encoded numbers;
  for (const int64_t value : list) numbers.push(value);
  return numbers;
}

template <typename KernelFamily>
Encoded checked_problem(const char* op, at::IntArrayRef list) {
  const Encoded problem = encoded_from(op, list);
  const std::string refusal = problem_refusal<KernelFamily>(problem);
  TW_CHECK(refusal.empty(), op, "problem must be ", refusal, " for ", KernelFamily::kName,
           ", but got ", problem.text());
  return problem;
}

template <typename KernelFamily>
Encoded checked_choice(const char* op, const Encoded& problem, const std::string& name) {
  const auto call = decode_problem<KernelFamily>(problem);
  for (const Encoded& choice : KernelFamily::candidates(call)) {
    if (name_of<KernelFamily>(choice) != name) continue;
    const Refusal refusal = KernelFamily::refusal(call, choice);
    TW_CHECK(!refusal, op, "choice must be one that the problem allows, but got '", name, "' for ",
             problem.text(), ": ", text_of(refusal));
    return choice;
  }
  TW_CHECK(false, op, "choice must be the name of a configuration of ", KernelFamily::kName,
           ", but got '", name, "'; torchweld._C.candidates lists them");
}

// Forces a choice for calls of this thread. If `choice` is empty, the function removes the forced
// choice of the problem.
void force_choice(std::string family, at::IntArrayRef problem, std::string choice) {
  const char* op = "_force_choice";
  visit_family(op, family, [&](auto f) {
    using KernelFamily = decltype(f);
    const Encoded checked = checked_problem<KernelFamily>(op, problem);
    const Key key = {KernelFamily::kName, KernelFamily::shape_class(checked)};
    auto& forced = this_thread.forced;
    const bool was_used = !forced.empty();
    if (choice.empty()) {
      forced.erase(key);
    } else {
      forced[key] = checked_choice<KernelFamily>(op, checked, choice);
    }
    choices_in_use += int(!forced.empty()) - int(was_used);
  });
}

void remember_choice(std::string gpu, std::string family, at::IntArrayRef problem,
                     std::string choice) {
  const char* op = "_remember_choice";
  visit_family(op, family, [&](auto f) {
    using KernelFamily = decltype(f);
    const Encoded checked = checked_problem<KernelFamily>(op, problem);
    const Encoded chosen = checked_choice<KernelFamily>(op, checked, choice);
    Remembered& table = remembered();
    const std::unique_lock<std::shared_mutex> lock(table.mutex);
    const bool was_used = !table.by_gpu.empty();
    table.by_gpu[gpu][{KernelFamily::kName, KernelFamily::shape_class(checked)}] = chosen;
    if (!was_used) ++choices_in_use;
  });
}

void forget_choices() {
  Remembered& table = remembered();
  const std::unique_lock<std::shared_mutex> lock(table.mutex);
  if (!table.by_gpu.empty()) --choices_in_use;
  table.by_gpu.clear();
}

// Returns the choice that pick() would return for a problem on the GPU called `gpu`, and the source
// of the choice: "forced", "tuned" or "heuristic".
std::tuple<std::string, std::string> picked_choice(std::string gpu, std::string family,
                                                   at::IntArrayRef problem) {
  const char* op = "_picked_choice";
  std::tuple<std::string, std::string> picked;
  visit_family(op, family, [&](auto f) {
    using KernelFamily = decltype(f);
    const Encoded checked = checked_problem<KernelFamily>(op, problem);
    const Encoded heuristic =
        KernelFamily::encode(KernelFamily::choose(decode_problem<KernelFamily>(checked)));
    const Resolved resolved = resolve<KernelFamily>(&gpu, checked, heuristic);
    picked = {name_of<KernelFamily>(resolved.choice), resolved.source};
  });
  return picked;
}

void observe(bool on) {
  ThreadState& state = this_thread;
  choices_in_use += int(on) - int(state.observing);
  state.observing = on;
  state.records.clear();
}

// Starts to record the choices and the launches of this thread.
void begin_observing() {
  this_thread.dry_run = false;
  observe(true);
}

// Starts a dry run that assumes the GPU with index `device`. If `device` is -2, the dry run assumes
// an A100. If `device` is any other negative number, or if the build has no CUDA, it assumes an
// H100.
void begin_dry_run(int64_t device) {
  ThreadState& state = this_thread;
  state.dry_run = false;
  state.assumed = device == -2 ? kA100Facts : kH100Facts;
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
  state.dry_run = true;
  observe(true);
}

// Stops the recording and returns the records as JSON objects.
std::vector<std::string> end_observing() {
  std::vector<std::string> seen;
  for (const Record& record : this_thread.records) seen.push_back(record.json());
  this_thread.dry_run = false;
  observe(false);
  return seen;
}

TORCH_LIBRARY_FRAGMENT(torchweld, m) {
  m.def("_force_choice(str family, int[] problem, str choice) -> ()", &force_choice);
  m.def("_remember_choice(str gpu, str family, int[] problem, str choice) -> ()", &remember_choice);
  m.def("_forget_choices() -> ()", &forget_choices);
  m.def("_picked_choice(str gpu, str family, int[] problem) -> (str choice, str source)",
        &picked_choice);
  m.def("_begin_observing() -> ()", &begin_observing);
  m.def("_begin_dry_run(int device) -> ()", &begin_dry_run);
  m.def("_end_observing() -> str[]", &end_observing);
}

}  // namespace

bool thread_is_dry_run() { return this_thread.dry_run; }

const DeviceFacts* assumed_device_facts() { return &this_thread.assumed; }

const char* CallScope::exchange(const char* name) {
  const char* const before = this_thread.part;
  this_thread.part = name;
  return before;
}

Encoded resolve_choice(const char* family, const Encoded& problem, const Encoded& heuristic) {
  Resolved resolved = {heuristic, "heuristic"};
  Families::visit(family, [&](auto f) {
    using KernelFamily = decltype(f);
    resolved = resolve<KernelFamily>(nullptr, problem, heuristic);
    ThreadState& state = this_thread;
    if (!state.observing) return;
    state.records.push_back(record_of<KernelFamily>(problem, resolved.choice));
    state.records.back().source = resolved.source;
    state.records.back().part = state.part;
  });
  return resolved.choice;
}

void observe_launch(const void* kernel, int threads, int dynamic_shared_bytes) {
#ifdef TORCHWELD_CUDA
  ThreadState& state = this_thread;
  if (!state.observing) return;
  // A launch before the first choice gets a record without a family.
  if (state.records.empty()) state.records.emplace_back();
  cudaFuncAttributes attributes = {};
  if (!state.dry_run && cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess) {
    (void)cudaGetLastError();  // the launch will report the error
    return;
  }
  // With the offset of the kernel's host function in the library, the kernel can be looked up in
  // the symbol table.
  Dl_info library = {};
  (void)dladdr(kernel, &library);
  const int64_t offset =
      static_cast<const char*>(kernel) - static_cast<const char*>(library.dli_fbase);
  state.records.back().kernels.push_back(
      {attributes.numRegs, static_cast<int64_t>(attributes.sharedSizeBytes) + dynamic_shared_bytes,
       threads, static_cast<int64_t>(attributes.localSizeBytes), offset});
#endif
}

}  // namespace torchweld
