// Launches the CUDA kernels of cross_entropy. If a call computes both the loss and the gradient,
// and its rows are long, it uses the ring kernel (ring.cuh). Other calls use the stream kernel
// (stream.cuh).
#include "core/device.h"
#include "core/launch.h"
#include "device/dispatch.cuh"
#include "ops/cross_entropy/ring.cuh"
#include "ops/cross_entropy/stream.cuh"
#include "softmax/config.h"

namespace torchweld {
namespace {

// The minimum row length for the ring kernel.
constexpr int64_t kRingFrom = 16384;

// Returns the index in kSoftmaxRings of a ring that reads each row only once. Returns -1 if there
// is no such ring, or if the call needs the stream kernel.
template <typename T>
int choose_ring(const CrossEntropyParams& p) {
  const bool reads_twice_else = p.loss != nullptr && p.dlogits != nullptr;
  if (!reads_twice_else || p.n < kRingFrom || p.terms.label_smoothing != 0.f ||
      p.scale.softcap != 0.f) {
    return -1;
  }
  SoftmaxProblem problem = {p.n, sizeof(T), rows_aligned(p.dlogits, p.n * sizeof(T))};
  const auto distance =
      reinterpret_cast<uintptr_t>(p.logits) - reinterpret_cast<uintptr_t>(p.dlogits);
  problem.in_phase = rows_aligned(reinterpret_cast<const void*>(distance),
                                  (p.row_stride - p.n) * static_cast<int64_t>(sizeof(T)));
  problem.rows = p.rows;
  problem.device = device_facts();
  const int ring = choose_softmax_ring(problem);
  const bool once =
      ring >= 0 && p.n <= kSoftmaxRings[ring].read_once_to(sizeof(T), false, problem.aligned);
  return once ? ring : -1;
}

template <typename Config>
void launch_ring(const CrossEntropyParams& p, const std::function<unsigned*()>& counter,
                 cudaStream_t stream) {
  using T = typename Config::T;
  const RowArgs<T> args = {static_cast<const T*>(p.logits),
                           nullptr,
                           static_cast<T*>(p.dlogits),
                           p.rows,
                           p.n,
                           p.row_stride,
                           0,
                           0};
  launch_kernel(cross_entropy_ring_kernel<Config>, ring_grid<Config>(p.rows), stream, args,
                TargetMask{p}, counter());
}

// Returns the number of threads per row, which is at most 512. If the row is long enough, each
// thread makes at least 4 loads.
template <typename T>
int stream_threads(int64_t n) {
  const int64_t accesses = n / (kVectorBytes / static_cast<int>(sizeof(T)));
  const int64_t wanted = (accesses / kCrossEntropyLoads + kWarp - 1) / kWarp * kWarp;
  return static_cast<int>(
      wanted < kWarp ? kWarp : (wanted < kCrossEntropyThreads ? wanted : kCrossEntropyThreads));
}

}  // namespace

void launch_cross_entropy(const CrossEntropyParams& params,
                          const std::function<unsigned*()>& counter, cudaStream_t stream) {
  dispatch_dtype(params.dtype, [&](auto element) {
    using T = decltype(element);
    const int chosen = choose_ring<T>(params);
    if (chosen >= 0) {
      dispatch_index<kNumSoftmaxRings>(chosen, [&](auto ring) {
        if constexpr (kSoftmaxRings[ring.value].portable()) {
          launch_ring<RingConfig<T, ring.value, /*kBackward=*/false>>(params, counter, stream);
        }
      });
      return;
    }
    for_each_grid_of(params.rows, [&](int64_t first, int64_t count) {
      launch_kernel(cross_entropy_stream_kernel<T>,
                    Grid(count, static_cast<unsigned>(stream_threads<T>(params.n))), stream, params,
                    first);
    });
  });
  check_launch("cross_entropy");
}

}  // namespace torchweld
