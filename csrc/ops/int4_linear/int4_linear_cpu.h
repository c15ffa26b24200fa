// CPU: y = x @ W^T + bias and dx = dy @ W for a 4-bit weight W in either layout.
//
// Each thread dequantises a block of W into a scratch that stays in its cache and multiplies it
// with torch's matmul. Blocks are bands of rows for y and bands of columns for dx, so that every
// result is one whole sum. The weight is rounded once, to the dtype of x.
#pragma once

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>  // the number of threads
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include <cstring>

#include "core/linear_common.h"
#include "core/parallel.h"
#include "ops/int4_pack/int4_layout.h"

namespace torchweld {

// A weight whose portable words, scale and zero can be had by row. `units` of a row of words may
// be written to the buffer; the words are where words() says.
struct PortableInt4 {
  Int4Shape shape;
  Tensor packed, scales, zeros;  // contiguous

  const uint32_t* words(int64_t row, int64_t unit, int64_t units, uint32_t* buffer) const {
    return static_cast<const uint32_t*>(packed.const_data_ptr()) + row * shape.units() + unit;
  }
  int64_t scale_at(int64_t row, int64_t group) const { return row * shape.groups + group; }
  int zero(int64_t row, int64_t group) const {
    const int64_t row_words = (shape.groups + kInt4Unit - 1) / kInt4Unit;
    const auto* from = zeros.const_data_ptr<int32_t>() + row * row_words + group / kInt4Unit;
    return int(int4_code(uint32_t(*from), int(group % kInt4Unit)));
  }
};

struct RepackedInt4 {
  Int4Shape shape;
  Tensor packed, scales, zeros;  // contiguous

  const uint32_t* words(int64_t row, int64_t unit, int64_t units, uint32_t* buffer) const {
    const auto* chunks = static_cast<const uint32_t*>(packed.const_data_ptr()) +
                         row / kInt4TileRows * shape.chunks() * kInt4ChunkWords;
    for (int64_t u = 0; u < units; ++u) {
      const int64_t at = unit + u;
      buffer[u] = int4_portable_word(chunks + at / kInt4ChunkUnits * kInt4ChunkWords,
                                     int(row % kInt4TileRows), int(at % kInt4ChunkUnits));
    }
    return buffer;
  }
  int64_t scale_at(int64_t row, int64_t group) const {
    const int64_t tile_group = row / kInt4TileRows * shape.groups + group;
    return tile_group * kInt4TileRows + int4_scale_place(int(row % kInt4TileRows));
  }
  int zero(int64_t row, int64_t group) const {
    const int64_t tile_group = row / kInt4TileRows * shape.groups + group;
    const int64_t at = tile_group * 2 + row % kInt4TileRows / kInt4Unit;
    return int(int4_code(uint32_t(zeros.const_data_ptr<int32_t>()[at]), int(row % kInt4Unit)));
  }
};

// Words of one group to values, in loops that compilers vectorise.
template <typename T, typename Wide>
void dequantise_words(T* to, const uint32_t* words, int64_t units, int zero, Wide scale) {
  constexpr int64_t kAtOnce = 8;
  constexpr int kFlip = __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__ ? 3 : 0;
  while (units > 0) {
    const int64_t now = std::min(units, kAtOnce), codes = now * kInt4Unit;
    uint8_t bytes[kAtOnce * 4], code[kAtOnce * kInt4Unit];
    std::memcpy(bytes, words, now * 4);
    for (int64_t i = 0; i < kAtOnce * 4; ++i) {
      code[2 * i] = bytes[i ^ kFlip] & 15;
      code[2 * i + 1] = bytes[i ^ kFlip] >> 4;
    }
    if (now == kAtOnce) {
      for (int64_t i = 0; i < kAtOnce * kInt4Unit; ++i) {
        to[i] = static_cast<T>(static_cast<Wide>(int(code[i]) - zero) * scale);
      }
    } else {
      for (int64_t i = 0; i < codes; ++i) {
        to[i] = static_cast<T>(static_cast<Wide>(int(code[i]) - zero) * scale);
      }
    }
    to += codes;
    words += now;
    units -= now;
  }
}

// Units [first, first + count) of a row, eight values each.
template <typename T, typename Weight>
void dequantise_row(T* to, const Weight& weight, int64_t row, int64_t first, int64_t count) {
  using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;
  constexpr int64_t kAtOnce = 64;
  uint32_t buffer[kAtOnce];
  const int64_t group_units = weight.shape.group_units();
  const T* scales = weight.scales.template const_data_ptr<T>();
  for (int64_t unit = first; unit < first + count;) {
    const int64_t group = unit / group_units;
    const int64_t end = std::min(first + count, (group + 1) * group_units);
    const Wide scale = static_cast<Wide>(scales[weight.scale_at(row, group)]);
    const int zero = weight.zero(row, group);
    T values[16];
    if constexpr (sizeof(T) == 2) {
      // Rounding to 16 bits is slow: a group has 16 different weights, which are looked up.
      for (int q = 0; q < 16; ++q) values[q] = static_cast<T>(static_cast<Wide>(q - zero) * scale);
    }
    while (unit < end) {
      const int64_t units = std::min(end - unit, kAtOnce);
      const uint32_t* words = weight.words(row, unit, units, buffer);
      if constexpr (sizeof(T) == 2) {
        for (int64_t u = 0; u < units; ++u) {
          for (int i = 0; i < kInt4Unit; ++i)
            to[u * kInt4Unit + i] = values[int4_code(words[u], i)];
        }
      } else {
        dequantise_words(to, words, units, zero, scale);
      }
      to += units * kInt4Unit;
      unit += units;
    }
  }
}

// Rows [row, row + rows) and units from `unit` on as (rows, 8 * units).
template <typename Weight>
void dequantise_block(const Tensor& to, const Weight& weight, int64_t row, int64_t unit) {
  const int64_t columns = to.size(1);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, to.scalar_type(), "int4_linear", [&] {
    auto* data = to.mutable_data_ptr<scalar_t>();
    for (int64_t r = 0; r < to.size(0); ++r) {
      dequantise_row(data + r * columns, weight, row + r, unit, columns / kInt4Unit);
    }
  });
}

// Of `count` rows or units, how many a block takes: so that it stays in cache, and every thread
// has some.
inline int64_t int4_block(int64_t count, int64_t bytes_each, int64_t least) {
  constexpr int64_t kBlockBytes = 1 << 20;
  const int64_t threads = at::get_num_threads();
  const int64_t share = (count + threads - 1) / threads;
  return std::min(count, std::max(least, std::min(share, kBlockBytes / bytes_each)));
}

// y (rows, N) = x (rows, K) @ W^T + bias
template <typename Weight>
void int4_linear_into(const Tensor& y, const Tensor& x, const Weight& weight,
                      const OptionalTensor& bias) {
  const int64_t n = weight.shape.n, k = weight.shape.k;
  if (k == 0) {
    is_given(bias) ? y.copy_(bias->expand_as(y)) : y.zero_();
    return;
  }
  const int64_t most = int4_block(n, k * x.element_size(), /*least=*/32);
  parallel_tasks((n + most - 1) / most, [&](int64_t task) {
    const int64_t row = task * most, rows = std::min(most, n - row);
    const Tensor block = at::empty({rows, k}, x.options());
    dequantise_block(block, weight, row, 0);
    Tensor out = y.narrow(1, row, rows);
    if (is_given(bias)) {
      at::addmm_out(out, bias->narrow(0, row, rows), x, block.t());
    } else {
      at::mm_out(out, x, block.t());
    }
  });
}

// dx (rows, K) = dy (rows, N) @ W
template <typename Weight>
void int4_linear_backward_into(const Tensor& dx, const Tensor& dy, const Weight& weight) {
  const int64_t n = weight.shape.n, units = weight.shape.units();
  if (n == 0) {
    dx.zero_();
    return;
  }
  const int64_t most = int4_block(units, n * kInt4Unit * dx.element_size(), /*least=*/8);
  parallel_tasks((units + most - 1) / most, [&](int64_t task) {
    const int64_t unit = task * most, count = std::min(most, units - unit);
    const Tensor block = at::empty({n, count * kInt4Unit}, dx.options());
    dequantise_block(block, weight, 0, unit);
    Tensor out = dx.narrow(1, unit * kInt4Unit, count * kInt4Unit);
    at::mm_out(out, dy, block);
  });
}

}  // namespace torchweld
