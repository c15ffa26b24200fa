// CPU: the gradient of attention, with the tiles of attention/cpu/fwd.h. A task computes all
// gradients of a kv head and its query heads. Therefore the order of every sum does not depend on
// the number of threads.
//
// The backward rounds the scores as the forward does and computes their softmax again, if lse
// allows it (is_own_lse). Otherwise all probabilities of a row would have the rounding error of a
// score.
#pragma once

#include <ATen/ops/zeros.h>

#include "attention/cpu/fwd.h"

namespace torchweld {

// The gradient of one kv head. `k`, `kt` and `v` are its packed tiles. dk and dv must start as
// zeros.
template <typename T, typename acc_t>
struct HeadGradient {
  const CpuAttention& a;
  const acc_t *k, *kt, *v;
  acc_t *dk, *dv;
  const CpuHeads<acc_t>* score_grad;  // receives the gradient of the scaled scores, or null

  // A block of query rows in packed form, and the statistics of the rows.
  struct Lanes {
    acc_t *q, *qt, *dout, *dout_t, *delta, *lse, *dlse;
    LaneStatistics<acc_t> statistics;
  };
  // Tiles (tiles, 64, width) of a block. The scores become p, and dp becomes ds. The slopes
  // 1 - (s / softcap)^2 exist if there is a soft cap, and the factors if there is dropout.
  struct Tiles {
    acc_t *scores, *dp, *slopes, *factors;
  };

  // Computes the scores of a tile in the way of the forward.
  void score_tile(acc_t* tile, const acc_t* keys, int64_t count, const Lanes& lanes,
                  int64_t width) const {
    const int64_t d = a.head_dim;
    if (!a.has_few_rows()) {
      return block_matmul(tile, keys, lanes.qt, count, width, d, /*add=*/false);
    }
    with_vectors([&] {
      for (int64_t c = 0; c < count; ++c) {
        for (int64_t r = 0; r < width; ++r) {
          tile[c * width + r] = dot<acc_t>(lanes.q + r * d, keys + c * d, d);
        }
      }
    });
  }

  // Computes the probabilities of a block in place of its scores, and delta of the rows for which
  // is_own_lse is true.
  void probabilities(const QueryBlock& block, int64_t b, int64_t h, acc_t sink, const Lanes& lanes,
                     const Tiles& tiles) const {
    const int64_t width = a.block_rows(), size = kTileKeys * width;
    score_tiles(a, b, h, block, tiles.scores, k + block.tile_begin * kTileKeys * a.head_dim,
                [&](acc_t* tile, const acc_t* keys, int64_t count) {
                  score_tile(tile, keys, count, lanes, width);
                });
    if (a.softcap > 0) slopes_of(block, tiles);
    acc_t *const max = lanes.statistics.max, *const sum = lanes.statistics.sum;
    acc_t* const tile_delta = lanes.statistics.tile_sum;
    softmax_of_lanes(tiles.scores, block, width, sink, lanes.statistics);
    bool own[QueryBlock::kMaxRows];
    double delta[QueryBlock::kMaxRows] = {};
    for (int64_t r = 0; r < width; ++r) {
      own[r] = is_own_lse(max[r], sum[r], lanes.lse[r]);
      // A row that sees no key has the sum 0.
      sum[r] = sum[r] == 0 ? 0 : (own[r] ? 1 / sum[r] : std::exp(max[r] - lanes.lse[r]));
    }
    acc_t* const factor = sum;
    with_vectors([&] {
      for (int64_t t = 0; t < block.tiles(); ++t) {
        acc_t *const p = tiles.scores + t * size, *const dp = tiles.dp + t * size;
        const int64_t used = block.keys_in(block.tile_begin + t) * width;
        std::fill_n(tile_delta, width, acc_t(0));
        for (int64_t i = 0; i < used; i += width) {
          for (int64_t r = 0; r < width; ++r) {
            p[i + r] *= factor[r];
            tile_delta[r] += p[i + r] * dp[i + r];
          }
        }
        for (int64_t r = 0; r < width; ++r) delta[r] += static_cast<double>(tile_delta[r]);
      }
    });
    for (int64_t r = 0; r < width; ++r) {
      if (own[r]) lanes.delta[r] = static_cast<acc_t>(delta[r]) - lanes.dlse[r];
    }
  }

  void slopes_of(const QueryBlock& block, const Tiles& tiles) const {
    const int64_t size = kTileKeys * a.block_rows();
    const auto inverse = static_cast<acc_t>(1 / a.softcap);
    for (int64_t t = 0; t < block.tiles(); ++t) {
      const int64_t used = block.keys_in(block.tile_begin + t) * a.block_rows();
      acc_t *const s = tiles.scores + t * size, *const slopes = tiles.slopes + t * size;
      with_vectors([&] {
        for (int64_t i = 0; i < used; ++i) slopes[i] = 1 - s[i] * inverse * (s[i] * inverse);
      });
      block.fill_hidden(slopes, block.tile_begin + t, a.block_rows(), acc_t(0));
    }
  }

  // Stores the gradient of the visible scores of a tile.
  void store_ds(const QueryBlock& block, int64_t b, int64_t h, int64_t tile,
                const acc_t* tile_ds) const {
    const int64_t first = tile * kTileKeys, width = a.block_rows();
    for (int64_t r = 0; r < block.rows; ++r) {
      acc_t* const to = score_grad->row(b, h, block.row + r) + block.first_key;
      const int64_t end = std::min<int64_t>(block.end[r], first + kTileKeys);
      for (int64_t j = std::max<int64_t>(block.begin[r], first); j < end; ++j) {
        to[j] = tile_ds[(j - first) * width + r];
      }
    }
  }

  void add_block(const QueryBlock& block, int64_t b, int64_t h, acc_t sink, const Lanes& lanes,
                 const Tiles& tiles, acc_t* dq_t) const {
    const bool drops = a.mask.dropout.given();
    const int64_t width = a.block_rows(), d = a.head_dim, n = a.head_dim_v;
    const int64_t size = kTileKeys * width;
    for (int64_t t = 0; t < block.tiles(); ++t) {
      acc_t* const dp = tiles.dp + t * size;
      block_matmul(dp, v + (block.tile_begin + t) * kTileKeys * n, lanes.dout_t,
                   block.keys_in(block.tile_begin + t), width, n, /*add=*/false);
      block.fill_hidden(dp, block.tile_begin + t, width, acc_t(0));
      if (drops) {
        dropout_tile(a, b, h, block, block.tile_begin + t, tiles.factors + t * size);
        multiply(dp, tiles.factors + t * size, block.keys_in(block.tile_begin + t) * width);
      }
    }
    probabilities(block, b, h, sink, lanes, tiles);
    for (int64_t t = 0; t < block.tiles(); ++t) {
      const int64_t at = (block.tile_begin + t) * kTileKeys;
      const int64_t keys = block.keys_in(block.tile_begin + t);
      acc_t *const p = tiles.scores + t * size, *const ds = tiles.dp + t * size;
      with_vectors([&] {
        for (int64_t i = 0; i < keys * width; i += width) {
          for (int64_t r = 0; r < width; ++r) {
            ds[i + r] = p[i + r] * (ds[i + r] - lanes.delta[r]);
          }
        }
        for (int64_t i = 0; a.softcap > 0 && i < keys * width; ++i)
          ds[i] *= tiles.slopes[t * size + i];
      });
      if (score_grad) store_ds(block, b, h, block.tile_begin + t, ds);
      if (drops) multiply(p, tiles.factors + t * size, keys * width);
      block_matmul(dv + at * n, p, lanes.dout, keys, n, width, /*add=*/true);
      block_matmul(dk + at * d, ds, lanes.q, keys, d, width, /*add=*/true);
      // The gradients of K and V of far keys are small themselves, those of Q are not.
      const SubnormalFlush flush(a.slopes.defined());
      block_matmul(dq_t, kt + at * d, ds, d, width, keys, /*add=*/t > 0, kTileKeys);
    }
  }
};

// ds (batch, nheads, seqlen_q, seqlen_k) receives the gradient of the visible scaled scores, if it
// is defined.
template <typename T>
void attention_backward_tiles(const CpuAttention& a, const Tensor& dquery, const Tensor& dkey,
                              const Tensor& dvalue, const Tensor& dsink, const Tensor& ds,
                              const Tensor& dout, const Tensor& query, const Tensor& key,
                              const Tensor& value, const Tensor& out, const Tensor& lse,
                              const OptionalTensor& dlse) {
  using acc_t = at::opmath_type<T>;
  const Tensor packed_k = pack_tiles<T, acc_t>(a, key, /*transposed=*/false);
  const Tensor packed_kt = pack_tiles<T, acc_t>(a, key, /*transposed=*/true);
  const Tensor packed_v = pack_tiles<T, acc_t>(a, value, /*transposed=*/false);
  const CpuHeads<T> q(query), o(out), d_out(dout), dq(dquery), dk(dkey), dv(dvalue);
  const CpuHeads<acc_t> l(lse);
  std::optional<CpuHeads<acc_t>> dl;
  if (is_given(dlse)) dl.emplace(*dlse);
  const CpuHeads<acc_t>* const lse_grad = dl ? &*dl : nullptr;
  std::optional<CpuHeads<acc_t>> ds_heads;
  if (ds.defined()) ds_heads.emplace(ds);
  Tensor sink_terms;
  if (a.sinks.defined()) sink_terms = at::zeros({a.batch, a.nheads}, a.sinks.options());
  const int64_t width = a.block_rows(), d = a.head_dim, n = a.head_dim_v, tiles = a.tiles();
  // Consecutive tasks belong to different sequences, so that all threads get about equal work.
  parallel_tasks(a.batch * a.nheads_kv, [&](int64_t task) {
    const int64_t b = task % a.batch, kv = task / a.batch;
    const int64_t kv_tiles = (b * a.nheads_kv + kv) * tiles * kTileKeys;
    const int64_t sums = tiles * kTileKeys * (d + n);
    const int64_t scores = tiles * kTileKeys * width, slopes = a.softcap > 0 ? scores : 0;
    const int64_t factors = a.mask.dropout.given() ? scores : 0;
    Scratch<acc_t> scratch(sums + 2 * scores + slopes + factors + width * (3 * d + 2 * n + 6),
                           packed_k.options());
    acc_t* const dk_sums = scratch.allocate(tiles * kTileKeys * d);
    acc_t* const dv_sums = scratch.allocate(tiles * kTileKeys * n);
    std::fill_n(dk_sums, sums, acc_t(0));
    const typename HeadGradient<T, acc_t>::Lanes lanes = {
        scratch.allocate(width * d),
        scratch.allocate(width * d),
        scratch.allocate(width * n),
        scratch.allocate(width * n),
        scratch.allocate(width),
        scratch.allocate(width),
        scratch.allocate(width),
        {scratch.allocate(width), scratch.allocate(width), scratch.allocate(width)}};
    const typename HeadGradient<T, acc_t>::Tiles block_tiles = {
        scratch.allocate(scores), scratch.allocate(scores), scratch.allocate(slopes),
        scratch.allocate(factors)};
    acc_t* const dq_t = scratch.allocate(width * d);
    const HeadGradient<T, acc_t> gradient = {a,
                                             packed_k.const_data_ptr<acc_t>() + kv_tiles * d,
                                             packed_kt.const_data_ptr<acc_t>() + kv_tiles * d,
                                             packed_v.const_data_ptr<acc_t>() + kv_tiles * n,
                                             dk_sums,
                                             dv_sums,
                                             ds_heads ? &*ds_heads : nullptr};
    const auto scale = static_cast<acc_t>(a.scale);
    for (int64_t h = kv * a.group(); h < (kv + 1) * a.group(); ++h) {
      for (int64_t index = 0; index < a.blocks(); ++index) {
        const QueryBlock block(a, b, index);
        for (int64_t r = 0; r < block.rows; ++r) {
          if (!block.sees(r)) std::fill_n(dq.row(b, h, block.row + r), d, T(0));
        }
        if (!block.empty()) {
          // The lanes of rows that see no key are packed as zeros.
          pack_rows<T, acc_t>(lanes.q, width, q.row(b, h, block.row), block.rows, d, q.row_stride,
                              q.column_stride, scale);
          pack_rows<T, acc_t>(lanes.dout, width, d_out.row(b, h, block.row), block.rows, n,
                              d_out.row_stride, d_out.column_stride);
          for (int64_t r = 0; r < width; ++r) {
            lanes.delta[r] = lanes.lse[r] = lanes.dlse[r] = 0;
            if (r < block.rows && block.sees(r)) {
              lanes.lse[r] = *l.row(b, h, block.row + r);
              if (lse_grad) lanes.dlse[r] = *lse_grad->row(b, h, block.row + r);
              continue;
            }
            std::fill_n(lanes.q + r * d, d, acc_t(0));
            std::fill_n(lanes.dout + r * n, n, acc_t(0));
          }
          row_deltas(lanes.delta, lanes.dout, o, lse_grad, b, h, block, n);
        }
        if (sink_terms.defined()) {
          sink_terms.mutable_data_ptr<acc_t>()[b * a.nheads + h] +=
              sink_gradient(a.template sink<acc_t>(h), lanes.delta, l, lse_grad, b, h, block);
        }
        if (block.empty()) continue;
        pack_transposed<acc_t, acc_t>(lanes.qt, width, lanes.q, width, d, d, 1);
        pack_transposed<acc_t, acc_t>(lanes.dout_t, width, lanes.dout, width, n, n, 1);
        gradient.add_block(block, b, h, a.template sink<acc_t>(h), lanes, block_tiles, dq_t);
        with_vectors([&] {
          for (int64_t r = 0; r < block.rows; ++r) {
            if (!block.sees(r)) continue;
            T* to = dq.row(b, h, block.row + r);
            for (int64_t c = 0; c < d; ++c) to[c] = static_cast<T>(dq_t[c * width + r] * scale);
          }
        });
      }
    }
    // Stores the sums, and zeros for keys that no row sees.
    const KeyRange seen = a.seen[b];
    const auto store = [&](const CpuHeads<T>& to, const acc_t* from, int64_t columns) {
      with_vectors([&] {
        for (int64_t j = 0; j < a.seqlen_k; ++j) {
          T* row = to.row(b, kv, j);
          if (j < seen.begin || j >= seen.end) {
            std::fill_n(row, columns, T(0));
            continue;
          }
          for (int64_t c = 0; c < columns; ++c) {
            row[c] = static_cast<T>(from[(j - seen.begin) * columns + c]);
          }
        }
      });
    };
    store(dk, dk_sums, d);
    store(dv, dv_sums, n);
  });
  add_sink_terms(dsink, sink_terms);
}

}  // namespace torchweld
