// Matmuls on the CPU. The matrices are blocks that are small enough to stay in the cache.
#pragma once

#include <ATen/native/CPUBlas.h>

#include <algorithm>

#include "core/index.h"
#include "core/simd_cpu.h"

namespace torchweld {

// Computes c (m, n) = a (m, k) @ b (k, n) on one thread. If `add` is true, computes c += a @ b
// instead. b and c are contiguous. The rows of a are `a_stride` elements apart.
template <typename T>
void block_matmul(T* c, const T* a, const T* b, int64_t m, int64_t n, int64_t k, bool add,
                  int64_t a_stride) {
  with_vectors([&] {
    for (int64_t i = 0; i < m; ++i) {
      if (!add) std::fill_n(c + i * n, n, T(0));
      for (int64_t l = 0; l < k; ++l) {
        const T factor = a[i * a_stride + l];
        for (int64_t j = 0; j < n; ++j) c[i * n + j] += factor * b[l * n + j];
      }
    }
  });
}

#ifdef CPUBLAS_BRGEMM_F32F32F32
// NOTE: oneDNN compiles and caches a kernel for every new combination of m, n and k, so callers
// should use few combinations.
template <>
inline void block_matmul(float* c, const float* a, const float* b, int64_t m, int64_t n, int64_t k,
                         bool add, int64_t a_stride) {
  if (m == 0 || n == 0) return;
  if (k == 0) {
    if (!add) std::fill_n(c, m * n, 0.0f);
    return;
  }
  // The rounding error of a chain of fp32 additions grows with the length of the chain. Therefore K
  // is split into blocks of at most kMaxChain elements, and the sums of the blocks are added.
  constexpr int64_t kMaxChain = 192;
  const int64_t blocks = divide_up(k, kMaxChain);
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t first = i * k / blocks, size = (i + 1) * k / blocks - first;
    at::native::cpublas::brgemm(m, n, size, a_stride, n, n, add || i > 0, a + first, b + first * n,
                                c,
                                /*is_vnni=*/false);
  }
}
#endif

template <typename T>
void block_matmul(T* c, const T* a, const T* b, int64_t m, int64_t n, int64_t k, bool add) {
  block_matmul(c, a, b, m, n, k, add, /*a_stride=*/k);
}

}  // namespace torchweld
