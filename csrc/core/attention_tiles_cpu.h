// CPU. What attention and softmax_matmul share: blocks of query rows, tiles of 64 keys, and how
// they are packed from the first key that a sequence sees.
#pragma once

#include <ATen/OpMathType.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <limits>

#include "core/check.h"
#include "core/gemm_cpu.h"
#include "core/mask.h"
#include "core/parallel.h"
#include "core/simd_cpu.h"

namespace torchweld {

constexpr int64_t kTileKeys = 64;

// A (batch, heads, rows, columns) tensor as its elements are found.
template <typename T>
struct CpuHeads {
  T* data;
  int64_t batch_stride, head_stride, row_stride, column_stride;

  explicit CpuHeads(const Tensor& t)
      : data(const_cast<T*>(t.const_data_ptr<T>())),
        batch_stride(t.stride(0)),
        head_stride(t.stride(1)),
        row_stride(t.stride(2)),
        column_stride(t.dim() > 3 ? t.stride(3) : 1) {}

  T* row(int64_t b, int64_t h, int64_t i) const {
    return data + b * batch_stride + h * head_stride + i * row_stride;
  }
};

// What one call is about: attention, or softmax_matmul with its scores instead of query and key.
struct CpuAttention {
  int64_t batch, nheads, nheads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v;
  MaskRule rule;
  double scale;
  Tensor pads;  // contiguous, or undefined

  CpuAttention(const Tensor& query, const Tensor& key, const Tensor& value,
               const OptionalTensor& leftpad, bool causal, double scale)
      : batch(query.size(0)),
        nheads(query.size(1)),
        nheads_kv(key.size(1)),
        seqlen_q(query.size(2)),
        seqlen_k(key.size(2)),
        head_dim(query.size(3)),
        head_dim_v(value.size(3)),
        rule{seqlen_q, seqlen_k, causal, is_given(leftpad)},
        scale(scale) {
    if (is_given(leftpad)) pads = leftpad->contiguous();
  }

  CpuAttention(const Tensor& scores, const Tensor& value, const OptionalTensor& leftpad,
               bool causal, double scale)
      : batch(scores.size(0)),
        nheads(scores.size(1)),
        nheads_kv(nheads),
        seqlen_q(scores.size(2)),
        seqlen_k(scores.size(3)),
        head_dim(0),
        head_dim_v(value.size(3)),
        rule{seqlen_q, seqlen_k, causal, is_given(leftpad)},
        scale(scale) {
    if (is_given(leftpad)) pads = leftpad->contiguous();
  }

  int64_t group() const { return nheads / std::max<int64_t>(1, nheads_kv); }
  int64_t pad(int64_t b) const {
    return pads.defined() ? rule.clamp_pad(pads.const_data_ptr<int32_t>()[b]) : 0;
  }
  int64_t tiles() const { return (seqlen_k + kTileKeys - 1) / kTileKeys; }
  // Query rows of a block. Under the causal rule a block takes keys that only its last row sees, so
  // that short sequences have small ones; the scores of many keys must stay in cache.
  int64_t block_rows() const {
    const bool small = seqlen_q <= 16 || seqlen_k > 8192;
    return small ? 16 : (seqlen_q <= 32 || (rule.causal && seqlen_q <= 256)) ? 32 : 64;
  }
  int64_t blocks() const { return (seqlen_q + block_rows() - 1) / block_rows(); }
};

// to (columns, width) = the transpose of rows, zeros from `rows` on.
template <typename T, typename acc_t>
void pack_transposed(acc_t* to, int64_t width, const T* from, int64_t rows, int64_t columns,
                     int64_t row_stride, int64_t column_stride, acc_t scale = 1) {
  with_vectors([&] {
    for (int64_t c = 0; c < columns; ++c) {
      for (int64_t r = 0; r < rows; ++r) {
        to[c * width + r] = static_cast<acc_t>(from[r * row_stride + c * column_stride]) * scale;
      }
      for (int64_t r = rows; r < width; ++r) to[c * width + r] = 0;
    }
  });
}

// to (height, columns) = rows, zeros from `rows` on.
template <typename T, typename acc_t>
void pack_rows(acc_t* to, int64_t height, const T* from, int64_t rows, int64_t columns,
               int64_t row_stride, int64_t column_stride, acc_t scale = 1) {
  with_vectors([&] {
    for (int64_t r = 0; r < rows; ++r) {
      const T* row = from + r * row_stride;
      if (column_stride == 1) {
        for (int64_t c = 0; c < columns; ++c) {
          to[r * columns + c] = static_cast<acc_t>(row[c]) * scale;
        }
      } else {
        for (int64_t c = 0; c < columns; ++c) {
          to[r * columns + c] = static_cast<acc_t>(row[c * column_stride]) * scale;
        }
      }
    }
    for (int64_t i = rows * columns; i < height * columns; ++i) to[i] = 0;
  });
}

// Keys or values tile by tile from the first that each sequence sees: (batch, nheads_kv, tiles, 64,
// columns), or transposed (..., columns, 64).
template <typename T, typename acc_t>
Tensor pack_tiles(const CpuAttention& a, const Tensor& t, bool transposed) {
  const int64_t columns = t.size(3), tiles = a.tiles();
  const Tensor packed = at::empty({a.batch, a.nheads_kv, tiles, kTileKeys * columns},
                                  t.options().dtype(c10::CppTypeToScalarType<acc_t>::value));
  acc_t* to = packed.mutable_data_ptr<acc_t>();
  const CpuHeads<T> from(t);
  parallel_tasks(a.batch * a.nheads_kv * tiles, [&](int64_t task) {
    const int64_t tile = task % tiles, h = task / tiles % a.nheads_kv;
    const int64_t b = task / tiles / a.nheads_kv, key = a.pad(b) + tile * kTileKeys;
    const int64_t rows = std::min(kTileKeys, a.seqlen_k - key);
    if (rows <= 0) return;
    acc_t* tile_to = to + task * kTileKeys * columns;
    const auto pack = transposed ? pack_transposed<T, acc_t> : pack_rows<T, acc_t>;
    pack(tile_to, kTileKeys, from.row(b, h, key), rows, columns, from.row_stride,
         from.column_stride, 1);
  });
  return packed;
}

// The query rows [row, row + rows) of a sequence, of which the first `dead` see nothing, and the
// keys [key, key + keys) that any of them sees.
struct QueryBlock {
  int64_t row, rows, dead, key, keys, tiles;

  QueryBlock(const CpuAttention& a, int64_t b, int64_t index) {
    key = a.pad(b);
    row = index * a.block_rows();
    rows = std::min(a.block_rows(), a.seqlen_q - row);
    int64_t first = a.rule.first_row(key);
    if (a.rule.causal) first = std::max(first, key - (a.seqlen_k - a.seqlen_q));
    dead = std::clamp<int64_t>(first - row, 0, rows);
    keys = std::max<int64_t>(0, a.rule.live(row + rows - 1, key).end - key);
    if (keys == 0) dead = rows;
    tiles = (keys + kTileKeys - 1) / kTileKeys;
  }

  // Of a tile's key, the rows [0, hidden) that do not see it.
  int64_t hidden_rows(const CpuAttention& a, int64_t tile, int64_t c, int64_t width) const {
    const int64_t at = tile * kTileKeys + c;
    if (at >= keys) return width;
    return a.rule.causal ? std::clamp<int64_t>(key + at - a.rule.position(row), 0, width) : 0;
  }

  // Puts `value` where a tile (64, width) is hidden.
  template <typename acc_t>
  void fill_hidden(const CpuAttention& a, acc_t* tile_scores, int64_t tile, int64_t width,
                   acc_t value) const {
    const int64_t last = tile * kTileKeys + kTileKeys - 1;
    if (last < keys && (!a.rule.causal || key + last <= a.rule.position(row))) return;
    for (int64_t c = 0; c < kTileKeys; ++c) {
      std::fill_n(tile_scores + c * width, hidden_rows(a, tile, c, width), value);
    }
  }
};

// delta[r] = sum(dout * out) of the rows that see something. dout (rows, columns) is packed.
template <typename T, typename acc_t>
void row_deltas(acc_t* delta, const acc_t* dout, const CpuHeads<T>& out, int64_t b, int64_t h,
                const QueryBlock& block, int64_t columns) {
  with_vectors([&] {
    for (int64_t r = block.dead; r < block.rows; ++r) {
      const T* row_out = out.row(b, h, block.row + r);
      acc_t sum = 0;
      for (int64_t c = 0; c < columns; ++c) {
        sum += dout[r * columns + c] * static_cast<acc_t>(row_out[c * out.column_stride]);
      }
      delta[r] = sum;
    }
  });
}

// One scratch of a task, cut into parts.
template <typename acc_t>
struct Scratch {
  Tensor tensor;
  acc_t* next;

  Scratch(int64_t count, const at::TensorOptions& options)
      : tensor(at::empty({count}, options)), next(tensor.mutable_data_ptr<acc_t>()) {}
  acc_t* take(int64_t count) { return std::exchange(next, next + count); }
};

}  // namespace torchweld
