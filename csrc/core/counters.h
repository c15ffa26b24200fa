// Workspaces that are cached between calls: counters, flags and memory for partial sums. The
// counters are zero before and after every kernel. This is host code for CUDA builds only.
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

// Allocates at least `count` zeros of dtype `type` with cudaMalloc.
// NOTE: torch's allocator can't be used. Before torch.compile captures a graph, it runs the graph
// once as a warm-up. During the warm-up torch's allocator allocates from the memory pool of the
// graph. A tensor from this pool can't be cached: torch raises an error or reuses the tensor's
// memory.
inline at::Tensor driver_zeros(int64_t count, at::ScalarType type, const at::Tensor& like,
                               cudaStream_t stream) {
  constexpr int64_t kGranularity = 1 << 20;
  const auto elem = static_cast<int64_t>(c10::elementSize(type));
  const int64_t bytes = divide_up(count * elem, kGranularity) * kGranularity;
  // If another thread is capturing a graph, the default capture mode would forbid cudaMalloc in
  // this thread.
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
    (void)cudaFree(memory);  // cudaFree waits for the kernels that use the memory
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
  };
  return at::from_blob(data, {bytes / elem}, free, like.options().dtype(type));
}

// Returns a tensor of at least `count` zeros. All calls of this thread on the current stream get
// the same memory. If this thread already has such tensors for `max_streams` other streams, returns
// an undefined tensor.
// NOTE: every thread has its own cache, with one entry per stream. Kernels that share an entry must
// not overlap, and kernels of one stream never overlap.
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

// Returns at least `count` uninitialised floats as a workspace for one kernel. The memory is
// cached, like the workspace of cuBLAS, so that a call allocates only its results.
inline at::Tensor cached_floats(int64_t count, const at::Tensor& like) {
  constexpr size_t kMaxStreams = 4;
  at::Tensor floats;
  if (!is_dry_run() && !under_capture())
    floats = cached_zeros<at::kFloat>(count, like, kMaxStreams);
  return floats.defined() ? floats : at::empty({count}, like.options().dtype(at::kFloat));
}

// Returns at least `count` counters that are zero when the kernel starts. The kernel must reset
// them to zero before it ends, so that the next call on this stream needs no memset.
// NOTE: during a graph capture, the counters are a new tensor that the graph itself clears. A
// replay of the graph may overlap any other kernel, so it can't share the cached counters.
inline at::Tensor zero_counters(int64_t count, const at::Tensor& like) {
  if (is_dry_run() || under_capture()) {
    return at::zeros({count}, like.options().dtype(at::kInt));
  }
  return cached_zeros<at::kInt>(count, like);
}

// Returns at least `count` flags, with which the blocks of a kernel signal each other. A flag is
// set if it holds the number of the launch (next_launch_number). Uninitialised memory does not hold
// this number. The kernel must reset each flag to 0.
// NOTE: during a graph capture, the flags are a new tensor. It needs no memset, because
// uninitialised memory does not hold the number of the launch.
inline at::Tensor block_flags(int64_t count, const at::Tensor& like) {
  if (is_dry_run() || under_capture()) {
    return at::empty({count}, like.options().dtype(at::kLong));
  }
  return cached_zeros<at::kLong>(count, like);
}

// Returns a functor. A call of the functor allocates one counter that is zero; the functor owns the
// counter. `like` must outlive the functor.
inline auto lazy_zero_counter(const at::Tensor& like) {
  return [&like, counter = at::Tensor()]() mutable {
    counter = zero_counters(1, like);
    return static_cast<unsigned*>(counter.mutable_data_ptr());
  };
}

}  // namespace torchweld
