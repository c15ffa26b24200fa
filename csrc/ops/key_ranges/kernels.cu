// The kernel of _key_ranges. A thread finds the sequence of one token by binary search and writes
// the token's range of keys.
#include "core/launch.h"
#include "ops/key_ranges/key_ranges.h"

namespace torchweld {
namespace {

constexpr int kThreads = 256;

__global__ __launch_bounds__(kThreads) void key_ranges_kernel(const KeyRangesParams params) {
  const int64_t token = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (token < params.tokens) params.write(token);
}

}  // namespace

void launch_key_ranges(const KeyRangesParams& params, cudaStream_t stream) {
  const int64_t blocks = (params.tokens + kThreads - 1) / kThreads;
  launch_kernel(key_ranges_kernel, {blocks, kThreads}, stream, params);
  check_launch("_key_ranges");
}

}  // namespace torchweld
