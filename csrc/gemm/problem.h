// The properties of a product by which its kernel is chosen. Pure host code.
#pragma once

#include <cstdint>

#include "core/device.h"
#include "core/dtype.h"

namespace torchweld {

// How operands are multiplied. kFloat32 splits them into three bf16 terms: fp32 accuracy on tensor
// cores.
enum class GemmMath : int8_t { kFloat16, kBFloat16, kTf32, kFloat32 };

// `tf32`: fp32 operands may be rounded to TF32.
constexpr GemmMath gemm_math(DType dtype, bool tf32) {
  if (dtype == DType::kFloat16) return GemmMath::kFloat16;
  if (dtype == DType::kBFloat16) return GemmMath::kBFloat16;
  return tf32 ? GemmMath::kTf32 : GemmMath::kFloat32;
}

constexpr int gemm_elem_size(GemmMath math) {
  return math == GemmMath::kFloat16 || math == GemmMath::kBFloat16 ? 2 : 4;
}

// A k-block has this many bytes of every row: 64 16-bit or 32 fp32 elements.
inline constexpr int kKBlockBytes = 128;

struct GemmProblem {
  int64_t m, n, k, batch;  // n is y's width, half of b's rows where gated
  bool gated, pointwise;   // a gate; a gate or an activation
  GemmMath math;
  bool a_k_major, b_k_major;  // each layout is a kernel of its own
  bool normed;                // a norm of a's rows precedes the product
  DeviceFacts device;

  constexpr int64_t width() const { return gated ? 2 * n : n; }  // of b
  constexpr int block_k() const { return kKBlockBytes / gemm_elem_size(math); }
  constexpr int64_t k_blocks() const {
    return k <= block_k() ? 1 : (k + block_k() - 1) / block_k();
  }
};

// How many splits K may have; their sums are added in a fixed order. kStreamK splits K wherever
// that makes the CTAs' work even.
inline constexpr int kGemmSplits[] = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32};
inline constexpr int kStreamK = 0;

inline constexpr const char* kNoNorm = "only the engine for few rows supports a norm in front";

}  // namespace torchweld
