// Workspaces that are cached between calls: counters, which are zero before and after every kernel,
// and partial sums. This is host code for CUDA builds only.
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

// Allocates at least `count` zeros of a type with cudaMalloc.
// NOTE: torch's allocator can't be used. While torch.compile warms up the memory pool of a graph,
// before the capture, that allocator allocates from the pool; keeping a tensor of the pool raises
// an error, or its memory is reused.
inline at::Tensor driver_zeros(int64_t count, at::ScalarType type, const at::Tensor& like,
                               cudaStream_t stream) {
  constexpr int64_t kGranularity = 1 << 20;
  const auto elem = static_cast<int64_t>(c10::elementSize(type));
  const int64_t bytes = divide_up(count * elem, kGranularity) * kGranularity;
  // Another thread may be capturing a graph, which would forbid cudaMalloc in the default capture
  // mode.
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

// Returns zeros that all calls of this thread on the current stream share. Returns an undefined
// tensor if this thread already uses `max_streams` other streams.
// NOTE: the cache key is the thread and the stream, because calls that share the memory must not
// overlap.
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

// Returns `count` uninitialised floats of workspace for one kernel. The memory is cached, as cuBLAS
// does with its workspace, so that a call allocates only its results.
inline at::Tensor cached_floats(int64_t count, const at::Tensor& like) {
  constexpr size_t kMaxStreams = 4;
  at::Tensor floats;
  if (!is_dry_run() && !under_capture())
    floats = cached_zeros<at::kFloat>(count, like, kMaxStreams);
  return floats.defined() ? floats : at::empty({count}, like.options().dtype(at::kFloat));
}

// Returns `count` counters that are zero when the kernel starts. The kernel resets them to zero, so
// the next call on this stream needs no memset.
// NOTE: a captured graph allocates and clears its own counters, because its replays may overlap any
// kernel.
inline at::Tensor zero_counters(int64_t count, const at::Tensor& like) {
  if (is_dry_run() || under_capture()) {
    return at::zeros({count}, like.options().dtype(at::kInt));
  }
  return cached_zeros<at::kInt>(count, like);
}

// Returns `count` flags with which the blocks of a kernel signal each other. A flag is set if it
// holds the number of the launch (next_launch_number), which uninitialised memory does not hold.
// The kernel resets each flag to 0.
// NOTE: a captured graph allocates its own flags, which for the same reason need no memset.
inline at::Tensor block_flags(int64_t count, const at::Tensor& like) {
  if (is_dry_run() || under_capture()) {
    return at::empty({count}, like.options().dtype(at::kLong));
  }
  return cached_zeros<at::kLong>(count, like);
}

// Returns a functor that allocates one zero counter when it is called, and owns it. `like` must
// outlive the functor.
inline auto lazy_zero_counter(const at::Tensor& like) {
  return [&like, counter = at::Tensor()]() mutable {
    counter = zero_counters(1, like);
    return static_cast<unsigned*>(counter.mutable_data_ptr());
  };
}

}  // namespace torchweld
