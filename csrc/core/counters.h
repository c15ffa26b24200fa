// Workspaces that are cached between calls: counters that are zero before and after every kernel,
// and partial sums. Host code of CUDA builds only.
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

// At least `count` zeros of a type, allocated with cudaMalloc.
// NOTE: torch's allocator can't be used. While torch.compile warms up a graph's pool, before the
// capture, it allocates from that pool; a cached tensor of the pool is an error or is reused.
inline at::Tensor driver_zeros(int64_t count, at::ScalarType type, const at::Tensor& like,
                               cudaStream_t stream) {
  constexpr int64_t kGranularity = 1 << 20;
  const auto elem = static_cast<int64_t>(c10::elementSize(type));
  const int64_t bytes = divide_up(count * elem, kGranularity) * kGranularity;
  // Another thread may be capturing, which forbids cudaMalloc in the default mode.
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  void* data = nullptr;
  if (cudaMalloc(&data, bytes) != cudaSuccess) {
    (void)cudaGetLastError();
    c10::cuda::CUDACachingAllocator::emptyCache();
    const cudaError_t error = cudaMalloc(&data, bytes);
    TORCH_CHECK_WITH(OutOfMemoryError, error == cudaSuccess, "torchweld: ", bytes >> 20,
                     " MiB of workspace could not be allocated: ", cudaGetErrorString(error));
  }
  C10_CUDA_CHECK(cudaMemsetAsync(data, 0, bytes, stream));
  const auto free = [](void* memory) {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    (void)cudaFree(memory);  // waits for the kernels that use it
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
  };
  return at::from_blob(data, {bytes / elem}, free, like.options().dtype(type));
}

// Zeros shared by all calls of this thread on the current stream; undefined for a thread's streams
// beyond the first `max_streams`.
// NOTE: cached by thread and stream, because calls that share the memory must not overlap.
template <at::ScalarType type>
at::Tensor cached_zeros(int64_t count, const at::Tensor& like, size_t max_streams = SIZE_MAX) {
  thread_local std::map<std::pair<c10::DeviceIndex, cudaStream_t>, at::Tensor> cache;
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  const std::pair key(stream.device_index(), stream.stream());
  const auto found = cache.find(key);
  if (found == cache.end() && cache.size() >= max_streams) return {};
  at::Tensor& zeros = found == cache.end() ? cache[key] : found->second;
  if (!zeros.defined() || zeros.numel() < count) {
    zeros.reset();
    zeros = driver_zeros(count, type, like, stream.stream());
  }
  return zeros;
}

// `count` uninitialised floats of workspace for one kernel. Cached like cuBLAS's workspace, so that
// a call allocates only its results.
inline at::Tensor cached_floats(int64_t count, const at::Tensor& like) {
  constexpr size_t kMaxStreams = 4;
  at::Tensor floats;
  if (!is_dry_run() && !under_capture())
    floats = cached_zeros<at::kFloat>(count, like, kMaxStreams);
  return floats.defined() ? floats : at::empty({count}, like.options().dtype(at::kFloat));
}

// `count` counters that are zero when the kernel starts. The kernel resets them to zero, so the
// next call on this stream needs no memset.
// NOTE: a captured graph allocates and clears its own, because its replays may overlap any kernel.
inline at::Tensor zero_counters(int64_t count, const at::Tensor& like) {
  if (is_dry_run() || under_capture()) {
    return at::zeros({count}, like.options().dtype(at::kInt));
  }
  return cached_zeros<at::kInt>(count, like);
}

// `count` flags between the blocks of a kernel. A flag is set if it holds the launch's number
// (next_launch_number), which uninitialised memory does not hold; the kernel resets it to 0.
// NOTE: a captured graph's own flags therefore need no memset.
inline at::Tensor block_flags(int64_t count, const at::Tensor& like) {
  if (is_dry_run() || under_capture()) {
    return at::empty({count}, like.options().dtype(at::kLong));
  }
  return cached_zeros<at::kLong>(count, like);
}

// A functor that allocates one zero counter when it is called, and owns it. `like` must outlive it.
inline auto lazy_zero_counter(const at::Tensor& like) {
  return [&like, counter = at::Tensor()]() mutable {
    counter = zero_counters(1, like);
    return static_cast<unsigned*>(counter.mutable_data_ptr());
  };
}

}  // namespace torchweld
