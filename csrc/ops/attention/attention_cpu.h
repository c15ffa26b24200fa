// CPU: attention in tiles of 64 keys by up to 64 query rows that stay in cache.
//
// Tiles are transposed, (keys, rows): then each query row is a lane of the vectors, its softmax
// needs no sum across lanes, and the gradients to key and value are plain matmuls of the tiles.
// Keys and values are packed once, in the statistics' dtype, from the first key that the sequence
// sees: padding is not read. A task is a block of query rows, in the gradient a kv head with all
// its query heads, so that every sum is added in one order whatever the number of threads.
#pragma once

#include <ATen/Dispatch.h>
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
constexpr int64_t kFewRows = 8;  // so few query rows do not pay for packed keys

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

// What one call of attention is about.
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

// One scratch of a task, cut into parts.
template <typename acc_t>
struct Scratch {
  Tensor tensor;
  acc_t* next;

  Scratch(int64_t count, const at::TensorOptions& options)
      : tensor(at::empty({count}, options)), next(tensor.mutable_data_ptr<acc_t>()) {}
  acc_t* take(int64_t count) { return std::exchange(next, next + count); }
};

// Scores (tiles, 64, width) to their exponentials against each row's largest, and their sum, which
// is added tile by tile: one long chain of additions would lose digits. part (width,) is scratch.
template <typename acc_t>
void softmax_of_lanes(acc_t* scores, int64_t tiles, int64_t width, acc_t* max, acc_t* sum,
                      acc_t* part) {
  with_vectors([&] {
    std::fill_n(max, width, -std::numeric_limits<acc_t>::infinity());
    std::fill_n(sum, width, acc_t(0));
    for (int64_t c = 0; c < tiles * kTileKeys; ++c) {
      const acc_t* s = scores + c * width;
      for (int64_t r = 0; r < width; ++r) max[r] = max[r] > s[r] ? max[r] : s[r];
    }
    for (int64_t t = 0; t < tiles; ++t) {
      std::fill_n(part, width, acc_t(0));
      for (int64_t c = 0; c < kTileKeys; ++c) {
        acc_t* s = scores + (t * kTileKeys + c) * width;
        for (int64_t r = 0; r < width; ++r) {
          s[r] = exp_in_vectors(s[r] - max[r]);
          part[r] += s[r];
        }
      }
      for (int64_t r = 0; r < width; ++r) sum[r] += part[r];
    }
  });
}

template <typename T>
void attention_forward_tiles(const CpuAttention& a, const Tensor& out, const Tensor* lse,
                             const Tensor& query, const Tensor& key, const Tensor& value) {
  using acc_t = at::opmath_type<T>;
  const Tensor packed_k = pack_tiles<T, acc_t>(a, key, /*transposed=*/false);
  const Tensor packed_vt = pack_tiles<T, acc_t>(a, value, /*transposed=*/true);
  const CpuHeads<T> q(query), o(out);
  const int64_t width = a.block_rows(), blocks = a.blocks(), d = a.head_dim, dv = a.head_dim_v;
  const int64_t heads = a.batch * a.nheads;
  parallel_tasks(heads * blocks, [&](int64_t task) {
    // Threads take halves of the tasks: each gets all sequences, and cheap and dear blocks.
    const int64_t turn = task / heads;
    const int64_t index = turn % 2 ? blocks - 1 - turn / 2 : turn / 2;
    const int64_t b = task % heads / a.nheads, h = task % a.nheads;
    const QueryBlock block(a, b, index);
    T* const to = o.row(b, h, block.row);
    acc_t* const lse_to =
        lse ? lse->mutable_data_ptr<acc_t>() + (b * a.nheads + h) * a.seqlen_q + block.row
            : nullptr;
    for (int64_t r = 0; r < block.dead; ++r) {
      std::fill_n(to + r * o.row_stride, dv, T(0));
      if (lse) lse_to[r] = -std::numeric_limits<acc_t>::infinity();
    }
    if (block.dead == block.rows) return;
    Scratch<acc_t> scratch((d + dv + block.tiles * kTileKeys + 3) * width, packed_k.options());
    acc_t* const qt = scratch.take(d * width);
    acc_t* const out_t = scratch.take(dv * width);
    acc_t* const scores = scratch.take(block.tiles * kTileKeys * width);
    acc_t *const max = scratch.take(width), *const sum = scratch.take(width);
    acc_t* const part = scratch.take(width);
    pack_transposed<T, acc_t>(qt, width, q.row(b, h, block.row), block.rows, d, q.row_stride,
                              q.column_stride, static_cast<acc_t>(a.scale));
    const int64_t kv_head = (b * a.nheads_kv + h / a.group()) * a.tiles();
    const acc_t* k = packed_k.const_data_ptr<acc_t>() + kv_head * kTileKeys * d;
    const acc_t* vt = packed_vt.const_data_ptr<acc_t>() + kv_head * kTileKeys * dv;
    for (int64_t t = 0; t < block.tiles; ++t) {
      acc_t* const tile = scores + t * kTileKeys * width;
      block_matmul(tile, k + t * kTileKeys * d, qt, kTileKeys, width, d, /*add=*/false);
      block.fill_hidden(a, tile, t, width, -std::numeric_limits<acc_t>::infinity());
    }
    softmax_of_lanes(scores, block.tiles, width, max, sum, part);
    for (int64_t t = 0; t < block.tiles; ++t) {
      block_matmul(out_t, vt + t * kTileKeys * dv, scores + t * kTileKeys * width, dv, width,
                   kTileKeys, /*add=*/t > 0);
    }
    with_vectors([&] {
      for (int64_t r = block.dead; r < block.rows; ++r) {
        for (int64_t c = 0; c < dv; ++c) {
          to[r * o.row_stride + c] = static_cast<T>(out_t[c * width + r] / sum[r]);
        }
      }
    });
    if (!lse) return;
    for (int64_t r = block.dead; r < block.rows; ++r) lse_to[r] = std::log(sum[r]) + max[r];
  });
}

// The same for a few query rows, as in decoding: keys and values are read once, where they are. A
// task is a kv head with all its query heads. The columns of key and value are adjacent.
template <typename T>
void attention_forward_rows(const CpuAttention& a, const Tensor& out, const Tensor* lse,
                            const Tensor& query, const Tensor& key, const Tensor& value) {
  using acc_t = at::opmath_type<T>;
  const CpuHeads<T> q(query), k(key), v(value), o(out);
  const int64_t d = a.head_dim, dv = a.head_dim_v, rows = a.group() * a.seqlen_q;
  const auto in_acc = query.options().dtype(c10::CppTypeToScalarType<acc_t>::value);
  parallel_tasks(a.batch * a.nheads_kv, [&](int64_t task) {
    const int64_t b = task % a.batch, kv = task / a.batch, pad = a.pad(b);
    Scratch<acc_t> scratch(rows * (a.seqlen_k + d + dv), in_acc);
    acc_t *const q_rows = scratch.take(rows * d), *const sums = scratch.take(rows * dv);
    acc_t* const scores = scratch.take(rows * a.seqlen_k);
    with_vectors([&] {
      const acc_t lowest = -std::numeric_limits<acc_t>::infinity();
      for (int64_t r = 0; r < rows; ++r) {
        const T* from = q.row(b, kv * a.group() + r / a.seqlen_q, r % a.seqlen_q);
        for (int64_t c = 0; c < d; ++c) {
          q_rows[r * d + c] =
              static_cast<acc_t>(from[c * q.column_stride]) * static_cast<acc_t>(a.scale);
        }
      }
      for (int64_t j = pad; j < a.seqlen_k; ++j) {
        for (int64_t r = 0; r < rows; ++r) {
          scores[r * a.seqlen_k + j] = dot(q_rows + r * d, k.row(b, kv, j), d);
        }
      }
      std::fill_n(sums, rows * dv, acc_t(0));
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t h = kv * a.group() + r / a.seqlen_q, i = r % a.seqlen_q;
        const LiveRange live = a.rule.live(i, pad);
        T* const to = o.row(b, h, i);
        acc_t* const lse_to =
            lse ? lse->mutable_data_ptr<acc_t>() + (b * a.nheads + h) * a.seqlen_q + i : nullptr;
        if (live.empty()) {
          std::fill_n(to, dv, T(0));
          if (lse_to) *lse_to = lowest;
          continue;
        }
        acc_t* const p = scores + r * a.seqlen_k;
        acc_t* const sum = sums + r * dv;
        const acc_t max = max_of(p + live.begin, live.end - live.begin);
        const acc_t total = exp_and_sum(p + live.begin, p + live.begin, live.end - live.begin, max);
        for (int64_t j = live.begin; j < live.end; ++j) {
          const T* from = v.row(b, kv, j);
          for (int64_t c = 0; c < dv; ++c) sum[c] += p[j] * static_cast<acc_t>(from[c]);
        }
        for (int64_t c = 0; c < dv; ++c) to[c] = static_cast<T>(sum[c] / total);
        if (lse_to) *lse_to = std::log(total) + max;
      }
    });
  });
}

}  // namespace torchweld
