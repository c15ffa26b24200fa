// CPU: y = x @ W^T + bias and dx = dy @ W for a 4-bit weight W in either layout.
//
// Each thread dequantises a block of W into a buffer that fits into the cache, and torch multiplies
// the block. For a few rows of x or dy, W is dequantised in registers instead. In the product for
// y, a block is a range of rows of W. In the product for dx, a block is a range of columns of W.
// Therefore no sum is split over several blocks. Each dequantised value of W is rounded once, to
// the dtype of x.
#pragma once

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>  // for at::get_num_threads
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include "core/batch_invariance.h"
#include "core/linear_common.h"
#include "core/matmul_cpu.h"
#include "core/parallel.h"
#include "int4/cpu/bfloat16.h"
#include "int4/cpu/rows.h"
#include "int4/cpu/rows_backward.h"

namespace torchweld {

using Int4Codes = uint32_t __attribute__((vector_size(4 * kInt4Unit)));

// Stores eight values scale * code, each rounded once. The caller must have subtracted the zero
// from the codes (two's complement).
template <typename T, typename Wide>
void store_codes(T* to, const Int4Codes& codes, Wide scale) {
  using Signed = int32_t __attribute__((vector_size(sizeof(codes))));
  const auto integers = reinterpret_cast<const Signed&>(codes);
  if constexpr (std::is_same_v<T, at::BFloat16>) {
    using Floats = float __attribute__((vector_size(sizeof(codes))));
    using Halves = uint16_t __attribute__((vector_size(sizeof(codes) / 2)));
    const Floats values = __builtin_convertvector(integers, Floats) * scale;
    Int4Codes bits;
    std::memcpy(&bits, &values, sizeof(bits));
    // Round to nearest even. A NaN here comes from a 16-bit scale. The low bits of such a NaN are
    // 0, so the rounding can't turn the NaN into inf.
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    const Halves halves = __builtin_convertvector(bits, Halves);
    std::memcpy(to, &halves, sizeof(halves));
  } else {
    for (int i = 0; i < kInt4Unit; ++i)
      to[i] = static_cast<T>(static_cast<Wide>(integers[i]) * scale);
  }
}

// Dequantises units [first, first + count) of a row. A unit is eight values.
template <typename T, typename Weight>
void dequantise_row(T* to, const Weight& weight, int64_t row, int64_t first, int64_t count) {
  using Wide = at::opmath_type<T>;
  using Codes = Int4Codes;
  constexpr Codes shifts = {0, 4, 8, 12, 16, 20, 24, 28};
  constexpr int64_t kBufferUnits = 64;
  uint32_t buffer[kBufferUnits];
  const int64_t group_units = weight.shape.group_units();
  const T* scales = weight.scales.template const_data_ptr<T>();
  for (int64_t unit = first; unit < first + count;) {
    const int64_t group = unit / group_units;
    const int64_t end = std::min(first + count, (group + 1) * group_units);
    const Wide scale = static_cast<Wide>(scales[weight.scale_at(row, group)]);
    const auto zero = uint32_t(weight.zero(row, group));
    while (unit < end) {
      const int64_t units = std::min(end - unit, kBufferUnits);
      const uint32_t* words = weight.words(row, unit, units, buffer);
      for (int64_t u = 0; u < units; ++u) {
        store_codes(to + u * kInt4Unit, ((Codes{} + words[u]) >> shifts & 15) - zero, scale);
      }
      to += units * kInt4Unit;
      unit += units;
    }
  }
}

// Dequantises a block of the weight into `to` (rows, 8 * units). The block starts at row `row` and
// unit `unit`.
template <typename Weight>
void dequantise_block(const Tensor& to, const Weight& weight, int64_t row, int64_t unit) {
  const int64_t rows = to.size(0), columns = to.size(1);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, to.scalar_type(), "int4_linear", [&] {
    auto* data = to.mutable_data_ptr<scalar_t>();
    with_vectors([&] {
      for (int64_t r = 0; r < rows; ++r) {
        dequantise_row(data + r * columns, weight, row + r, unit, columns / kInt4Unit);
      }
    });
  });
}

// Returns the number of rows or units per block, if there are `count` rows or units in all. A block
// fits into the cache, and every thread gets about one block or more.
inline int64_t int4_block(int64_t count, int64_t bytes_each, int64_t min_size) {
  constexpr int64_t kBlockBytes = 1 << 20;
  const int64_t threads = at::get_num_threads();
  const int64_t per_thread = (count + threads - 1) / threads;
  return std::min(count, std::max(min_size, std::min(per_thread, kBlockBytes / bytes_each)));
}

// Computes y (rows, N) = x (rows, K) @ W^T + bias.
template <typename Weight>
void int4_linear_into(const Tensor& y, const Tensor& x, const Weight& weight,
                      const OptionalTensor& bias) {
  const int64_t n = weight.shape.n, k = weight.shape.k;
  if (k == 0) {
    is_given(bias) ? y.copy_(bias->expand_as(y)) : y.zero_();
    return;
  }
  if (is_batch_invariant()) {
    const Tensor dense = at::empty({n, k}, x.options());
    dequantise_block(dense, weight, 0, 0);
    return invariant_linear_into(y, x, dense, bias);
  }
  const int64_t block_size = int4_block(n, k * x.element_size(), /*min_size=*/32);
  if (supports_int4_bf16(x, weight)) return int4_bf16_into(y, x, weight, bias, block_size);
  if (supports_int4_rows(x, weight)) return int4_rows_into(y, x, weight, bias);
  parallel_tasks((n + block_size - 1) / block_size, [&](int64_t task) {
    const int64_t row = task * block_size, rows = std::min(block_size, n - row);
    const Tensor block = at::empty({rows, k}, x.options());
    dequantise_block(block, weight, row, 0);
    int4_block_matmul(y, x, block, bias, row);
  });
}

// Computes dx (rows, K) = dy (rows, N) @ W.
template <typename Weight>
void int4_linear_backward_into(const Tensor& dx, const Tensor& dy, const Weight& weight) {
  const int64_t n = weight.shape.n, units = weight.shape.units();
  if (n == 0) {
    dx.zero_();
    return;
  }
  if (supports_int4_rows_backward(dy, weight)) return int4_rows_backward_into(dx, dy, weight);
  const int64_t block_size = int4_block(units, n * kInt4Unit * dx.element_size(), /*min_size=*/8);
  parallel_tasks((units + block_size - 1) / block_size, [&](int64_t task) {
    const int64_t unit = task * block_size, count = std::min(block_size, units - unit);
    const Tensor block = at::empty({n, count * kInt4Unit}, dx.options());
    dequantise_block(block, weight, 0, unit);
    Tensor out = dx.narrow(1, unit * kInt4Unit, count * kInt4Unit);
    at::mm_out(out, dy, block);
  });
}

}  // namespace torchweld
