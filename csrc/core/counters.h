// Counters that kernels find zero and leave zero. Host code of CUDA builds only.
#pragma once

#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>

#include <map>
#include <utility>

#include "core/check.h"
#include "core/launch.h"

namespace torchweld {

// `count` counters that are zero when the kernel starts. The kernel leaves them zero, so that they
// serve the next call on this stream without being cleared.
// NOTE: they belong to a thread and a stream, because two calls that share them must not overlap.
// Under capture the graph clears its own: its replays may overlap with anything.
inline at::Tensor zero_counters(int64_t count, const at::Tensor& like) {
  const auto options = like.options().dtype(at::kInt);
  if (is_dry_run() ||
      c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) {
    return at::zeros({count}, options);
  }
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  thread_local std::map<std::pair<c10::DeviceIndex, cudaStream_t>, at::Tensor> kept;
  at::Tensor& counters = kept[{stream.device_index(), stream.stream()}];
  if (!counters.defined() || counters.numel() < count) counters = at::zeros({count}, options);
  return counters;
}

// Gives one such counter when it is called, and keeps it; `like` outlives it.
inline auto zero_counter_if_asked(const at::Tensor& like) {
  return [&like, counter = at::Tensor()]() mutable {
    counter = zero_counters(1, like);
    return static_cast<unsigned*>(counter.mutable_data_ptr());
  };
}

}  // namespace torchweld
