// CPU: the gradient of attention, with the tiles of attention/cpu/fwd.h. A task computes all
// gradients of a kv head and its query heads. Therefore the order of every sum does not depend on
// the number of threads.
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

  // A block of query rows in packed form, and the statistics of the rows.
  struct Lanes {
    acc_t *q, *qt, *dout, *dout_t, *lse, *delta;
  };

  // Computes p = exp(s - lse) in place of s, and ds = p * (dp - delta) in place of dp. With a soft
  // cap, ds is also multiplied by the slope of the cap, 1 - (s / softcap)^2. Hidden elements have p
  // = 0 and an undefined ds.
  void softmax_gradient(acc_t* s, acc_t* dp, const Lanes& lanes, int64_t width) const {
    const acc_t inverse = a.softcap > 0 ? static_cast<acc_t>(1 / a.softcap) : 0;
    with_vectors([&] {
      for (int64_t c = 0; c < kTileKeys; ++c) {
        acc_t *p = s + c * width, *ds = dp + c * width;
        for (int64_t r = 0; r < width; ++r) {
          const acc_t slope = 1 - p[r] * inverse * (p[r] * inverse);
          p[r] = exp_in_vectors(p[r] - lanes.lse[r]);
          ds[r] = p[r] * (ds[r] - lanes.delta[r]) * slope;
        }
      }
    });
  }

  void add_block(const QueryBlock& block, const Lanes& lanes, acc_t* tiles, acc_t* dq_t) const {
    const int64_t width = a.block_rows(), d = a.head_dim, n = a.head_dim_v;
    acc_t *const s = tiles, *const dp = tiles + kTileKeys * width;
    for (int64_t t = block.tile_begin; t < block.tile_end; ++t) {
      const int64_t at = t * kTileKeys;
      block_matmul(s, k + at * d, lanes.qt, kTileKeys, width, d, /*add=*/false);
      block_matmul(dp, v + at * n, lanes.dout_t, kTileKeys, width, n, /*add=*/false);
      if (a.softcap > 0) cap_tile(s, kTileKeys * width, a.softcap);
      block.fill_hidden(s, t, width, -std::numeric_limits<acc_t>::infinity());
      softmax_gradient(s, dp, lanes, width);
      block.fill_hidden(dp, t, width, acc_t(0));
      block_matmul(dv + at * n, s, lanes.dout, kTileKeys, n, width, /*add=*/true);
      block_matmul(dk + at * d, dp, lanes.q, kTileKeys, d, width, /*add=*/true);
      block_matmul(dq_t, kt + at * d, dp, d, width, kTileKeys, /*add=*/t > block.tile_begin);
    }
  }
};

template <typename T>
void attention_backward_tiles(const CpuAttention& a, const Tensor& dquery, const Tensor& dkey,
                              const Tensor& dvalue, const Tensor& dsink, const Tensor& dout,
                              const Tensor& query, const Tensor& key, const Tensor& value,
                              const Tensor& out, const Tensor& lse, const OptionalTensor& dlse) {
  using acc_t = at::opmath_type<T>;
  const Tensor packed_k = pack_tiles<T, acc_t>(a, key, /*transposed=*/false);
  const Tensor packed_kt = pack_tiles<T, acc_t>(a, key, /*transposed=*/true);
  const Tensor packed_v = pack_tiles<T, acc_t>(a, value, /*transposed=*/false);
  const CpuHeads<T> q(query), o(out), d_out(dout), dq(dquery), dk(dkey), dv(dvalue);
  const CpuHeads<acc_t> l(lse);
  std::optional<CpuHeads<acc_t>> dl;
  if (is_given(dlse)) dl.emplace(*dlse);
  const CpuHeads<acc_t>* const lse_grad = dl ? &*dl : nullptr;
  Tensor sink_terms;
  if (a.sinks.defined()) sink_terms = at::zeros({a.batch, a.nheads}, a.sinks.options());
  const int64_t width = a.block_rows(), d = a.head_dim, n = a.head_dim_v, tiles = a.tiles();
  // Consecutive tasks belong to different sequences, so that all threads get about equal work.
  parallel_tasks(a.batch * a.nheads_kv, [&](int64_t task) {
    const int64_t b = task % a.batch, kv = task / a.batch;
    const int64_t kv_tiles = (b * a.nheads_kv + kv) * tiles * kTileKeys;
    const int64_t sums = tiles * kTileKeys * (d + n);
    Scratch<acc_t> scratch(sums + width * (3 * d + 2 * n + 2 * kTileKeys + 2), packed_k.options());
    acc_t* const dk_sums = scratch.allocate(tiles * kTileKeys * d);
    acc_t* const dv_sums = scratch.allocate(tiles * kTileKeys * n);
    std::fill_n(dk_sums, sums, acc_t(0));
    const typename HeadGradient<T, acc_t>::Lanes lanes = {
        scratch.allocate(width * d), scratch.allocate(width * d), scratch.allocate(width * n),
        scratch.allocate(width * n), scratch.allocate(width),     scratch.allocate(width)};
    acc_t *const dq_t = scratch.allocate(width * d), *const pair =
                                                         scratch.allocate(2 * kTileKeys * width);
    const HeadGradient<T, acc_t> gradient = {a,
                                             packed_k.const_data_ptr<acc_t>() + kv_tiles * d,
                                             packed_kt.const_data_ptr<acc_t>() + kv_tiles * d,
                                             packed_v.const_data_ptr<acc_t>() + kv_tiles * n,
                                             dk_sums,
                                             dv_sums};
    const auto scale = static_cast<acc_t>(a.scale);
    for (int64_t h = kv * a.group(); h < (kv + 1) * a.group(); ++h) {
      for (int64_t index = 0; index < a.blocks(); ++index) {
        const QueryBlock block(a, b, index);
        for (int64_t r = 0; r < block.rows; ++r) {
          if (!block.sees(r)) std::fill_n(dq.row(b, h, block.row + r), d, T(0));
        }
        if (!block.empty()) {
          // The lanes of rows that see no key are packed as zeros, and their p is 0.
          pack_rows<T, acc_t>(lanes.q, width, q.row(b, h, block.row), block.rows, d, q.row_stride,
                              q.column_stride, scale);
          pack_rows<T, acc_t>(lanes.dout, width, d_out.row(b, h, block.row), block.rows, n,
                              d_out.row_stride, d_out.column_stride);
          for (int64_t r = 0; r < width; ++r) {
            lanes.delta[r] = 0;
            if (r < block.rows && block.sees(r)) {
              lanes.lse[r] = *l.row(b, h, block.row + r);
              continue;
            }
            lanes.lse[r] = std::numeric_limits<acc_t>::infinity();
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
        gradient.add_block(block, lanes, pair, dq_t);
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
