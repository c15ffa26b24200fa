// Memory that is kept from call to call: counters that kernels find zero and leave zero, and sums
// on their way from block to block. Host code of CUDA builds only.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>

#include <map>
#include <utility>

#include "core/check.h"
#include "core/index.h"
#include "core/launch.h"

namespace torchweld {

inline bool under_capture() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

// At least `count` zeros of a type, in memory of the driver.
// NOTE: not in that of torch's allocator. While a graph's pool is filled, which torch.compile does
// in a call before the capture, it gives pieces of the pool, and what is kept of it there is an
// error or is given away again.
inline at::Tensor driver_zeros(int64_t count, at::ScalarType type, const at::Tensor& like,
                               cudaStream_t stream) {
  constexpr int64_t kWhole = 1 << 20;
  const auto elem = static_cast<int64_t>(c10::elementSize(type));
  const int64_t bytes = divide_up(count * elem, kWhole) * kWhole;
  // Other threads may be capturing.
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  void* data = nullptr;
  if (cudaMalloc(&data, bytes) != cudaSuccess) {
    (void)cudaGetLastError();
    c10::cuda::CUDACachingAllocator::emptyCache();
    const cudaError_t error = cudaMalloc(&data, bytes);
    TORCH_CHECK_WITH(OutOfMemoryError, error == cudaSuccess, "torchweld: ", bytes >> 20,
                     " MiB of workspace can't be had: ", cudaGetErrorString(error));
  }
  C10_CUDA_CHECK(cudaMemsetAsync(data, 0, bytes, stream));
  const auto free = [](void* kept) {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    (void)cudaFree(kept);  // it waits for what still uses it
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
  };
  return at::from_blob(data, {bytes / elem}, free, like.options().dtype(type));
}

// Zeros that this thread's calls on this stream share; undefined beyond `most_streams` of a thread.
// NOTE: they belong to a thread and a stream, because two calls that share them must not overlap.
template <at::ScalarType type>
at::Tensor kept_zeros(int64_t count, const at::Tensor& like, size_t most_streams = SIZE_MAX) {
  thread_local std::map<std::pair<c10::DeviceIndex, cudaStream_t>, at::Tensor> kept;
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  const std::pair key(stream.device_index(), stream.stream());
  const auto at = kept.find(key);
  if (at == kept.end() && kept.size() >= most_streams) return {};
  at::Tensor& zeros = at == kept.end() ? kept[key] : at->second;
  if (!zeros.defined() || zeros.numel() < count) {
    zeros.reset();
    zeros = driver_zeros(count, type, like, stream.stream());
  }
  return zeros;
}

// `count` floats of any value for one kernel, of which there are never many. Like cuBLAS's
// workspace they are kept, so that no call needs more memory than its results.
inline at::Tensor kept_floats(int64_t count, const at::Tensor& like) {
  constexpr size_t kMaxStreams = 4;
  at::Tensor floats;
  if (!is_dry_run() && !under_capture()) floats = kept_zeros<at::kFloat>(count, like, kMaxStreams);
  return floats.defined() ? floats : at::empty({count}, like.options().dtype(at::kFloat));
}

// `count` counters that are zero when the kernel starts. The kernel leaves them zero, so that they
// serve the next call on this stream without being cleared.
// NOTE: under capture the graph clears its own: its replays may overlap with anything.
inline at::Tensor zero_counters(int64_t count, const at::Tensor& like) {
  if (is_dry_run() || under_capture()) {
    return at::zeros({count}, like.options().dtype(at::kInt));
  }
  return kept_zeros<at::kInt>(count, like);
}

// `count` flags by which the blocks of a kernel tell each other something. A flag is up where it
// holds the launch's own number, which no memory holds by chance; the kernel takes it down to 0.
// NOTE: so a graph's own flags need no clearing before they are used.
inline at::Tensor block_flags(int64_t count, const at::Tensor& like) {
  if (is_dry_run() || under_capture()) {
    return at::empty({count}, like.options().dtype(at::kLong));
  }
  return kept_zeros<at::kLong>(count, like);
}

// Gives one such counter when it is called, and keeps it; `like` outlives it.
inline auto zero_counter_if_asked(const at::Tensor& like) {
  return [&like, counter = at::Tensor()]() mutable {
    counter = zero_counters(1, like);
    return static_cast<unsigned*>(counter.mutable_data_ptr());
  };
}

}  // namespace torchweld
