// Memory that is kept from call to call: counters that kernels find zero and leave zero, and sums
// on their way from block to block. Host code of CUDA builds only.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>

#include <map>
#include <tuple>

#include "core/check.h"
#include "core/launch.h"

namespace torchweld {

inline bool under_capture() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

// At least `count` numbers of a type, zero at first, that this thread's calls on this stream share.
// NOTE: they belong to a thread and a stream, because two calls that share them must not overlap.
inline at::Tensor kept_zeros(int64_t count, at::ScalarType type, const at::Tensor& like) {
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  thread_local std::map<std::tuple<c10::DeviceIndex, cudaStream_t, at::ScalarType>, at::Tensor>
      kept;
  at::Tensor& zeros = kept[{stream.device_index(), stream.stream(), type}];
  if (!zeros.defined() || zeros.numel() < count) {
    zeros = at::zeros({count}, like.options().dtype(type));
  }
  return zeros;
}

// `count` floats of any value for one kernel, of which there are never many. Like cuBLAS's
// workspace they are kept, so that no call needs more memory than its results.
inline at::Tensor kept_floats(int64_t count, const at::Tensor& like) {
  if (is_dry_run() || under_capture()) {
    return at::empty({count}, like.options().dtype(at::kFloat));
  }
  return kept_zeros(count, at::kFloat, like);
}

// `count` counters that are zero when the kernel starts. The kernel leaves them zero, so that they
// serve the next call on this stream without being cleared.
// NOTE: under capture the graph clears its own: its replays may overlap with anything.
inline at::Tensor zero_counters(int64_t count, const at::Tensor& like) {
  if (is_dry_run() || under_capture()) {
    return at::zeros({count}, like.options().dtype(at::kInt));
  }
  return kept_zeros(count, at::kInt, like);
}

// `count` flags by which the blocks of a kernel tell each other something. A flag is up where it
// holds the launch's own number, which no memory holds by chance; the kernel takes it down to 0.
// NOTE: so a graph's own flags need no clearing before they are used.
inline at::Tensor block_flags(int64_t count, const at::Tensor& like) {
  if (is_dry_run() || under_capture()) {
    return at::empty({count}, like.options().dtype(at::kLong));
  }
  return kept_zeros(count, at::kLong, like);
}

// Gives one such counter when it is called, and keeps it; `like` outlives it.
inline auto zero_counter_if_asked(const at::Tensor& like) {
  return [&like, counter = at::Tensor()]() mutable {
    counter = zero_counters(1, like);
    return static_cast<unsigned*>(counter.mutable_data_ptr());
  };
}

}  // namespace torchweld
