#include "core/sum.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>

#include <algorithm>

#include "core/parallel.h"

namespace torchweld {

void sum_into(const Tensor& to, const Tensor& x, int64_t dim) {
  Tensor out = to;
  if (x.numel() == 0 || out.numel() != 1 || x.scalar_type() == acc_dtype(x)) {
    at::sum_out(out, x, dim);
    return;
  }
  // NOTE: the sum is computed in chunks with fp32 partials, because ATen would round the partial
  // sum of each thread to 16 bits if several threads computed a 16-bit sum. A chunk has kChunk
  // elements, and an fp32 copy of a chunk fits into the cache.
  constexpr int64_t kChunk = 1 << 16;
  const Tensor values = x.reshape({x.numel()});
  const Tensor partials =
      at::empty({(x.numel() + kChunk - 1) / kChunk}, x.options().dtype(at::kFloat));
  parallel_tasks(partials.numel(), [&](int64_t chunk) {
    const int64_t first = chunk * kChunk, count = std::min(kChunk, x.numel() - first);
    partials[chunk].copy_(values.narrow(0, first, count).to(at::kFloat).sum());
  });
  out.copy_(partials.sum().view(out.sizes()));
}

}  // namespace torchweld
