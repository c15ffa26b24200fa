#include "puzzles/sum.h"

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
  // NOTE: where threads share one 16-bit sum, ATen keeps the part of each in 16 bits.
  constexpr int64_t kPart = 1 << 16;  // stays in cache as fp32
  const Tensor values = x.reshape({x.numel()});
  const Tensor parts = at::empty({(x.numel() + kPart - 1) / kPart}, x.options().dtype(at::kFloat));
  parallel_tasks(parts.numel(), [&](int64_t part) {
    const int64_t first = part * kPart, count = std::min(kPart, x.numel() - first);
    parts[part].copy_(values.narrow(0, first, count).to(at::kFloat).sum());
  });
  out.copy_(parts.sum().view(out.sizes()));
}

}  // namespace torchweld
