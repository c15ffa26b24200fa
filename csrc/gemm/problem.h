// The properties of a matmul that decide which kernel computes it. This is pure host code.
#pragma once

#include <cstdint>

#include "core/device.h"
#include "core/dtype.h"

namespace torchweld {

// The arithmetic of a product. kFloat32 splits each fp32 value into three bf16 terms, so that the
// tensor cores compute products with fp32 accuracy.
enum class GemmMath : int8_t { kFloat16, kBFloat16, kTf32, kFloat32 };

// `tf32` says whether fp32 operands may be rounded to TF32.
constexpr GemmMath gemm_math(DType dtype, bool tf32) {
  if (dtype == DType::kFloat16) return GemmMath::kFloat16;
  if (dtype == DType::kBFloat16) return GemmMath::kBFloat16;
  return tf32 ? GemmMath::kTf32 : GemmMath::kFloat32;
}

constexpr int gemm_elem_size(GemmMath math) {
  return math == GemmMath::kFloat16 || math == GemmMath::kBFloat16 ? 2 : 4;
}

// A k-block is a slice of K. One row of an operand has 128 bytes in a k-block: 64 elements of 16
// bits or 32 elements of fp32.
inline constexpr int kKBlockBytes = 128;

// The dim of a grouped product that is divided into groups. kRows: each group has rows of a and y
// and a matrix b of its own. kK: each group has columns of a and b (K) and a matrix y of its own.
enum class Grouped : int8_t { kNone, kRows, kK };

struct GemmProblem {
  int64_t m, n, k, batch;  // n is the number of columns of y; if gated, b has 2n rows
  bool gated, pointwise;   // pointwise: whether the epilogue has a gate or an activation
  GemmMath math;
  // Whether K is the contiguous dim of a, and whether K is the contiguous dim of b. Each of the
  // four combinations has its own kernel.
  bool a_k_major, b_k_major;
  bool normed;  // whether the rows of a are normalised before the product
  DeviceFacts device;
  Grouped grouped = Grouped::kNone;  // if grouped, `batch` is the number of groups
  bool invariant = false;  // whether the bits of a row of y must not depend on the other rows

  // The number of rows of b. In a gated product, b has two halves of n rows each.
  constexpr int64_t width() const { return gated ? 2 * n : n; }
  constexpr int block_k() const { return kKBlockBytes / gemm_elem_size(math); }
  constexpr int64_t k_blocks() const {
    return k <= block_k() ? 1 : (k + block_k() - 1) / block_k();
  }
  // Returns a product without groups with about the same time, if the rows are divided evenly among
  // the groups. tile_rows is the number of rows of a tile. tile_columns is the number of columns of
  // y that the CTAs of a cluster compute together.
  constexpr GemmProblem without_groups(int64_t tile_rows, int64_t tile_columns) const {
    GemmProblem p = *this;
    p.grouped = Grouped::kNone;
    if (grouped == Grouped::kRows) {
      const int64_t groups = batch < m ? batch : m, rows = m / groups;
      p.m = groups * ((rows + tile_rows - 1) / tile_rows * tile_rows);
      p.n = (n + tile_columns - 1) / tile_columns * tile_columns;
      p.batch = 1;
    }
    if (grouped == Grouped::kK) p.k = (k + batch - 1) / batch;
    return p;
  }
};

// The supported numbers of splits of K. The partials of the splits are added in a fixed order.
// kStreamK stands for stream-K: the schedule splits the K of some tiles so that all CTAs get the
// same amount of work.
inline constexpr int kGemmSplits[] = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32};
inline constexpr int kStreamK = 0;

inline constexpr const char* kGroupedLayout =
    "groups of rows need a K-major first operand, and groups of K need MN-major operands";
inline constexpr const char* kOtherSums =
    "the batch-invariant mode, and only this mode, adds up K in one order for every number of rows";
inline constexpr const char* kNoNorm = "only the engine for few rows supports a norm in front";

}  // namespace torchweld
