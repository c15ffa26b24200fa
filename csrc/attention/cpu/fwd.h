// CPU: the forward of attention. A tile of scores has 64 keys and up to 64 query rows, and stays in
// the cache.
//
// A tile of scores is transposed: (keys, rows). Each query row is a vector lane, so the softmax of
// a row needs no sum across lanes. In the backward (attention/cpu/bwd.h), dkey and dvalue are plain
// matmuls of such tiles. Keys and values are packed once, in the dtype of the statistics. The
// packed range goes from the first to the last key that a row of the sequence sees, so padding is
// not read. A task of the forward computes a block of query rows. A task of the backward computes
// all query heads of a kv head, so the order of every sum does not depend on the number of threads.
#pragma once

#include <ATen/Dispatch.h>

#include "attention/cpu/dropout.h"
#include "attention/cpu/lane_products.h"

namespace torchweld {

// The statistics of the rows of a block, (width,) each.
template <typename acc_t>
struct LaneStatistics {
  acc_t *max, *sum;
  acc_t* tile_sum;  // scratch memory
};

// Overwrites scores (tiles, 64, width) with exp(scores - max) of each row, and computes the sums of
// the rows, including the sink. Each tile is summed separately, and then the sums of the tiles are
// added. One long chain of additions would lose digits. Rows from block.rows on and rows that see
// no key get the sum 0, and their elements become 0.
template <typename acc_t>
void softmax_of_lanes(acc_t* scores, const QueryBlock& block, int64_t width, acc_t sink,
                      const LaneStatistics<acc_t>& lanes) {
  const int64_t tiles = block.tiles();
  acc_t *const max = lanes.max, *const sum = lanes.sum, *const tile_sum = lanes.tile_sum;
  constexpr acc_t kInfinity = std::numeric_limits<acc_t>::infinity();
  with_vectors([&] {
    for (int64_t r = 0; r < width; ++r) max[r] = r < block.rows && block.sees(r) ? sink : kInfinity;
    for (int64_t t = 0; t < tiles; ++t) {
      const acc_t* s = scores + t * kTileKeys * width;
      for (int64_t c = 0; c < block.keys_in(block.tile_begin + t); ++c, s += width) {
        for (int64_t r = 0; r < width; ++r) max[r] = max[r] > s[r] ? max[r] : s[r];
      }
    }
    for (int64_t r = 0; r < width; ++r) {
      sum[r] = sink == -std::numeric_limits<acc_t>::infinity() ? 0 : exp_in_vectors(sink - max[r]);
    }
    for (int64_t t = 0; t < tiles; ++t) {
      std::fill_n(tile_sum, width, acc_t(0));
      for (int64_t c = 0; c < block.keys_in(block.tile_begin + t); ++c) {
        acc_t* s = scores + (t * kTileKeys + c) * width;
        for (int64_t r = 0; r < width; ++r) {
          s[r] = exp_of_negative(s[r] - max[r]);
          tile_sum[r] += s[r];
        }
      }
      for (int64_t r = 0; r < width; ++r) sum[r] += tile_sum[r];
    }
  });
}

// Adds the bias to a tile of scores (64, width).
template <typename acc_t>
void add_bias_tile(const CpuAttention& a, int64_t b, int64_t h, const QueryBlock& block,
                   int64_t tile, acc_t* scores) {
  const CpuHeads<acc_t> bias(a.bias);
  const int64_t key = block.first_key + tile * kTileKeys, width = a.block_rows();
  const int64_t keys = std::min(block.keys_in(tile), a.seqlen_k - key);
  for (int64_t r = 0; r < block.rows; ++r) {
    const acc_t* from = bias.row(b, h, block.row + r) + key * bias.column_stride;
    for (int64_t c = 0; c < keys; ++c) scores[c * width + r] += from[c * bias.column_stride];
  }
}

// Subtracts the distances times the ALiBi slope from a tile of scores (64, width).
template <typename acc_t>
void add_alibi_tile(const CpuAttention& a, int64_t b, int64_t h, const QueryBlock& block,
                    int64_t tile, acc_t* scores) {
  const acc_t* const slope_of_head = a.slopes.const_data_ptr<acc_t>() + h;
  const int64_t width = a.block_rows(), keys = block.keys_in(tile);
  const int64_t first =
      block.first_key + tile * kTileKeys - a.mask.position(block.row, a.mask.sequence(b).end);
  with_vectors([&] {
    const acc_t slope = *slope_of_head;  // a copy, which no store to `scores` may change
    acc_t* score = scores;
    for (int64_t c = 0; c < keys; ++c, score += width) {
      const auto distance = static_cast<acc_t>(first + c);
      for (int r = 0; r < static_cast<int>(width); ++r) {
        score[r] -= slope * std::abs(distance - static_cast<acc_t>(r));
      }
    }
  });
}

// Computes the score tiles (tiles, 64, width) of a block of head h of sequence b. product()
// multiplies `count` packed keys by the query rows. `k` are the packed keys of the block's first
// tile on. Hidden elements become -inf.
template <typename acc_t, typename E, typename Product>
void score_tiles(const CpuAttention& a, int64_t b, int64_t h, const QueryBlock& block,
                 acc_t* scores, const E* k, const Product& product) {
  const int64_t size = kTileKeys * a.block_rows();
  for (int64_t t = 0; t < block.tiles(); ++t) {
    acc_t* const tile = scores + t * size;
    product(tile, k + t * kTileKeys * a.head_dim, block.keys_in(block.tile_begin + t));
    if (a.softcap > 0) cap_tile(tile, size, a.softcap);
    if (a.bias.defined()) add_bias_tile(a, b, h, block, block.tile_begin + t, tile);
    if (a.slopes.defined()) add_alibi_tile(a, b, h, block, block.tile_begin + t, tile);
    block.fill_hidden(tile, block.tile_begin + t, a.block_rows(),
                      -std::numeric_limits<acc_t>::infinity());
  }
}

// Keys and values are packed in the dtype E.
template <typename T, typename E = at::opmath_type<T>>
void attention_forward_tiles(const CpuAttention& a, const Tensor& out, const Tensor* lse,
                             const Tensor& query, const Tensor& key, const Tensor& value) {
  using acc_t = at::opmath_type<T>;
  using Products = LaneProducts<acc_t, E>;
  const Tensor packed_k = pack_tiles<T, E>(a, key, /*transposed=*/false);
  const Tensor packed_vt = pack_tiles<T, E>(a, value, /*transposed=*/true);
  const CpuHeads<T> q(query), o(out);
  const int64_t width = a.block_rows(), blocks = a.blocks(), d = a.head_dim, dv = a.head_dim_v;
  const auto in_acc = query.options().dtype(c10::CppTypeToScalarType<acc_t>::value);
  const int64_t heads = a.batch * a.nheads;
  parallel_tasks(heads * blocks, [&](int64_t task) {
    const SubnormalFlush flush(a.slopes.defined());
    const int64_t index = from_both_ends(task / heads, blocks);
    const int64_t b = task % heads / a.nheads, h = task % a.nheads;
    const QueryBlock block(a, b, index);
    const acc_t sink = a.template sink<acc_t>(h);
    T* const to = o.row(b, h, block.row);
    acc_t* const lse_to =
        lse ? lse->mutable_data_ptr<acc_t>() + (b * a.nheads + h) * a.seqlen_q + block.row
            : nullptr;
    for (int64_t r = 0; r < block.rows; ++r) {
      if (block.sees(r)) continue;
      std::fill_n(to + r * o.row_stride, dv, T(0));
      if (lse) lse_to[r] = sink;
    }
    if (block.empty()) return;
    const int64_t tile_size = kTileKeys * width, dropped = a.mask.dropout.given() ? tile_size : 0;
    Scratch<acc_t> scratch(
        Products::scratch_size(width, d) + (dv + 3) * width + block.tiles() * tile_size + dropped,
        in_acc);
    Products products(a, scratch);
    acc_t* const out_t = scratch.allocate(dv * width);
    acc_t* const scores = scratch.allocate(block.tiles() * tile_size);
    acc_t* const factors = scratch.allocate(dropped);
    const LaneStatistics<acc_t> lanes = {scratch.allocate(width), scratch.allocate(width),
                                         scratch.allocate(width)};
    products.pack_query(q.row(b, h, block.row), block.rows, q, static_cast<acc_t>(a.scale));
    const int64_t kv_tile = (b * a.nheads_kv + h / a.group()) * a.tiles() + block.tile_begin;
    const E* k = packed_k.const_data_ptr<E>() + kv_tile * kTileKeys * d;
    const E* vt = packed_vt.const_data_ptr<E>() + kv_tile * kTileKeys * dv;
    score_tiles(a, b, h, block, scores, k, [&](acc_t* tile, const E* keys, int64_t count) {
      products.multiply_keys(tile, keys, count);
    });
    softmax_of_lanes(scores, block, width, sink, lanes);
    for (int64_t t = 0; t < block.tiles(); ++t) {
      const int64_t keys = block.keys_in(block.tile_begin + t);
      acc_t* const p = scores + t * tile_size;
      if (dropped) {
        dropout_tile(a, b, h, block, block.tile_begin + t, factors);
        multiply(p, factors, keys * width);
      }
      products.multiply_values(out_t, vt + t * kTileKeys * dv, p, keys, /*add=*/t > 0);
    }
    release_tiles<E>();
    with_vectors([&] {
      for (int64_t r = 0; r < block.rows; ++r) {
        if (!block.sees(r)) continue;
        for (int64_t c = 0; c < dv; ++c) {
          to[r * o.row_stride + c] = static_cast<T>(out_t[c * width + r] / lanes.sum[r]);
        }
      }
    });
    if (!lse) return;
    for (int64_t r = 0; r < block.rows; ++r) {
      if (block.sees(r)) lse_to[r] = std::log(lanes.sum[r]) + lanes.max[r];
    }
  });
}

// The forward for few query rows, as in decoding. It does not pack keys or values. A task computes
// all query rows of one kv head of one sequence. `key` and `value` must have stride 1 along the
// last dimension.
template <typename T>
void attention_forward_rows(const CpuAttention& a, const Tensor& out, const Tensor* lse,
                            const Tensor& query, const Tensor& key, const Tensor& value) {
  using acc_t = at::opmath_type<T>;
  const CpuHeads<T> q(query), k(key), v(value), o(out);
  std::optional<CpuHeads<acc_t>> bias;
  if (a.bias.defined()) bias.emplace(a.bias);
  const int64_t d = a.head_dim, dv = a.head_dim_v, rows = a.group() * a.seqlen_q;
  const auto in_acc = query.options().dtype(c10::CppTypeToScalarType<acc_t>::value);
  parallel_tasks(a.batch * a.nheads_kv, [&](int64_t task) {
    const SubnormalFlush flush(a.slopes.defined());
    const int64_t b = task % a.batch, kv = task / a.batch;
    const SequenceMask sequence = a.mask.sequence(b);
    const int64_t dropped = a.mask.dropout.given() ? a.seqlen_k : 0;
    Scratch<acc_t> scratch(rows * (a.seqlen_k + d + dv) + dv + dropped, in_acc);
    acc_t *const q_rows = scratch.allocate(rows * d), *const sums = scratch.allocate(rows * dv);
    acc_t *const part = scratch.allocate(dv), *const factors = scratch.allocate(dropped);
    acc_t* const scores = scratch.allocate(rows * a.seqlen_k);
    with_vectors([&] {
      for (int64_t r = 0; r < rows; ++r) {
        const T* from = q.row(b, kv * a.group() + r / a.seqlen_q, r % a.seqlen_q);
        for (int64_t c = 0; c < d; ++c) {
          q_rows[r * d + c] =
              static_cast<acc_t>(from[c * q.column_stride]) * static_cast<acc_t>(a.scale);
        }
      }
      for (int64_t j = a.seen[b].begin; j < a.seen[b].end; ++j) {
        for (int64_t r = 0; r < rows; ++r) {
          scores[r * a.seqlen_k + j] = dot<acc_t>(q_rows + r * d, k.row(b, kv, j), d);
        }
      }
      std::fill_n(sums, rows * dv, acc_t(0));
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t h = kv * a.group() + r / a.seqlen_q, i = r % a.seqlen_q;
        const KeyRange live = a.mask.row_keys(i, sequence);
        const acc_t sink = a.template sink<acc_t>(h);
        T* const to = o.row(b, h, i);
        acc_t* const lse_to =
            lse ? lse->mutable_data_ptr<acc_t>() + (b * a.nheads + h) * a.seqlen_q + i : nullptr;
        if (live.empty()) {
          std::fill_n(to, dv, T(0));
          if (lse_to) *lse_to = sink;
          continue;
        }
        acc_t* const p = scores + r * a.seqlen_k;
        acc_t* const sum = sums + r * dv;
        const int64_t keys = live.end - live.begin;
        if (a.softcap > 0) cap_row(p + live.begin, keys, static_cast<acc_t>(a.softcap));
        if (bias) {
          const acc_t* from = bias->row(b, h, i);
          for (int64_t j = live.begin; j < live.end; ++j) p[j] += from[j * bias->column_stride];
        }
        if (a.slopes.defined()) {
          const acc_t slope = a.slopes.const_data_ptr<acc_t>()[h];
          const auto first = static_cast<acc_t>(live.begin - a.mask.position(i, sequence.end));
          for (int j = 0; j < keys; ++j) {
            p[live.begin + j] -= slope * std::abs(first + static_cast<acc_t>(j));
          }
        }
        const acc_t most = max_of(p + live.begin, keys), max = most > sink ? most : sink;
        acc_t total = exp_and_sum(p + live.begin, p + live.begin, keys, max);
        if (a.sinks.defined()) total += exp_in_vectors(sink - max);
        if (dropped) {
          dropout_factors(a.mask.dropout, {b * a.nheads + h, i, 1, live.begin, keys}, factors, 0,
                          1);
          multiply(p + live.begin, factors, keys);
        }
        // Sums are added in blocks of keys, because one chain of additions over thousands of keys
        // would lose digits.
        for (int64_t first = live.begin; first < live.end; first += kTileKeys) {
          std::fill_n(part, dv, acc_t(0));
          add_rows(part, p + first, v.row(b, kv, first), std::min(kTileKeys, live.end - first),
                   v.row_stride, dv);
          for (int64_t c = 0; c < dv; ++c) sum[c] += part[c];
        }
        for (int64_t c = 0; c < dv; ++c) to[c] = static_cast<T>(sum[c] / total);
        if (lse_to) *lse_to = std::log(total) + max;
      }
    });
  });
}

}  // namespace torchweld
