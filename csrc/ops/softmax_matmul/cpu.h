// CPU: softmax_matmul and its backward. Both process a block of query rows at a time, in tiles
// (rows, 64 keys) that stay in the cache. In the backward, one task computes a whole head, so that
// the order of the sums does not depend on the number of threads.
#pragma once

#include "attention/cpu/tiles.h"

namespace torchweld {

// Returns the columns of tile `t` that row r of the block sees.
inline KeyRange live_columns(const QueryBlock& block, int64_t r, int64_t t) {
  const int64_t first = t * kTileKeys;
  return {std::clamp<int64_t>(block.begin[r] - first, 0, kTileKeys),
          std::clamp<int64_t>(block.end[r] - first, 0, kTileKeys)};
}

// Computes p = exp(z - max(z)) of the rows of a block, and the sums of these rows, including the
// sink. z are the scaled and capped scores. p is (tiles, height, 64), with 0 for hidden keys.
template <typename T, typename acc_t>
void softmax_of_rows(const CpuAttention& a, const QueryBlock& block, const CpuHeads<T>& scores,
                     int64_t b, int64_t h, acc_t* p, acc_t* sums, acc_t* maxima) {
  const int64_t height = a.block_rows();
  const auto scale = static_cast<acc_t>(a.scale);
  const acc_t sink = a.template sink<acc_t>(h);
  with_vectors([&] {
    for (int64_t r = 0; r < height; ++r) {
      for (int64_t t = block.tile_begin; t < block.tile_end; ++t) {
        const KeyRange live = r < block.rows ? live_columns(block, r, t) : KeyRange{0, 0};
        acc_t* const to = p + ((t - block.tile_begin) * height + r) * kTileKeys;
        std::fill_n(to, live.begin, acc_t(0));
        std::fill(to + live.end, to + kTileKeys, acc_t(0));
      }
    }
    for (int64_t r = 0; r < block.rows; ++r) {
      const T* from = scores.row(b, h, block.row + r) + block.first_key;
      const auto each_tile = [&](const auto& body) {
        for (int64_t t = block.tile_begin; t < block.tile_end; ++t) {
          const KeyRange live = live_columns(block, r, t);
          acc_t* const to = p + ((t - block.tile_begin) * height + r) * kTileKeys;
          if (!live.empty()) body(t, to + live.begin, live.begin, live.end - live.begin);
        }
      };
      acc_t max = sink, sum = 0;
      each_tile([&](int64_t t, acc_t* to, int64_t first, int64_t count) {
        for (int64_t j = 0; j < count; ++j) {
          to[j] = static_cast<acc_t>(from[t * kTileKeys + first + j]) * scale;
        }
        if (a.softcap > 0) cap_row(to, count, static_cast<acc_t>(a.softcap));
        const acc_t most = max_of(to, count);
        max = max > most ? max : most;
      });
      each_tile([&](int64_t, acc_t* to, int64_t, int64_t count) {
        sum += exp_and_sum(to, to, count, max);
      });
      if (a.sinks.defined()) sum += exp_in_vectors(sink - max);
      sums[r] = sum;
      maxima[r] = max;
    }
  });
}

template <typename T>
void softmax_matmul_tiles(const CpuAttention& a, const Tensor& out, const Tensor* lse,
                          const Tensor& scores, const Tensor& value) {
  using acc_t = at::opmath_type<T>;
  const Tensor packed_v = pack_tiles<T, acc_t>(a, value, /*transposed=*/false);
  const CpuHeads<T> s(scores), o(out);
  const int64_t height = a.block_rows(), blocks = a.blocks(), n = a.head_dim_v;
  const int64_t heads = a.batch * a.nheads;
  parallel_tasks(heads * blocks, [&](int64_t task) {
    const int64_t b = task % heads / a.nheads, h = task % a.nheads;
    const QueryBlock block(a, b, from_both_ends(task / heads, blocks));
    const acc_t sink = a.template sink<acc_t>(h);
    acc_t* const lse_to =
        lse ? lse->mutable_data_ptr<acc_t>() + (b * a.nheads + h) * a.seqlen_q + block.row
            : nullptr;
    Scratch<acc_t> scratch(height * (n + block.tiles() * kTileKeys + 2), packed_v.options());
    acc_t *const sums = scratch.allocate(height), *const maxima = scratch.allocate(height);
    acc_t* const rows_out = scratch.allocate(height * n);
    acc_t* const p = scratch.next;
    softmax_of_rows(a, block, s, b, h, p, sums, maxima);
    for (int64_t r = 0; lse_to && r < block.rows; ++r) {
      if (block.sees(r)) lse_to[r] = std::log(sums[r]) + maxima[r];
    }
    const acc_t* v = packed_v.const_data_ptr<acc_t>() +
                     ((b * a.nheads + h) * a.tiles() + block.tile_begin) * kTileKeys * n;
    for (int64_t t = 0; t < block.tiles(); ++t) {
      block_matmul(rows_out, p + t * height * kTileKeys, v + t * kTileKeys * n, height, n,
                   kTileKeys,
                   /*add=*/t > 0);
    }
    with_vectors([&] {
      for (int64_t r = 0; r < block.rows; ++r) {
        T* const to = o.row(b, h, block.row + r);
        if (!block.sees(r)) {
          std::fill_n(to, n, T(0));
          if (lse_to) lse_to[r] = sink;
          continue;
        }
        for (int64_t c = 0; c < n; ++c) to[c] = static_cast<T>(rows_out[r * n + c] / sums[r]);
      }
    });
  });
}

template <typename T>
void softmax_matmul_backward_tiles(const CpuAttention& a, const Tensor& dscores,
                                   const Tensor& dvalue, const Tensor& dsink, const Tensor& dout,
                                   const Tensor& scores, const Tensor& value, const Tensor& out,
                                   const Tensor& lse) {
  using acc_t = at::opmath_type<T>;
  const Tensor packed_vt = pack_tiles<T, acc_t>(a, value, /*transposed=*/true);
  const CpuHeads<T> s(scores), o(out), d_out(dout), ds(dscores), dv(dvalue);
  const CpuHeads<acc_t> l(lse);
  const int64_t height = a.block_rows(), n = a.head_dim_v, tiles = a.tiles();
  Tensor sink_terms;
  if (a.sinks.defined()) sink_terms = at::zeros({a.batch, a.nheads}, a.sinks.options());
  // Consecutive tasks belong to different sequences, so that all threads get about equal work.
  parallel_tasks(a.batch * a.nheads, [&](int64_t task) {
    const int64_t b = task % a.batch, h = task / a.batch;
    const KeyRange seen = a.seen[b];
    Scratch<acc_t> scratch(tiles * kTileKeys * (n + 2 * height) + height * (2 * n + 3),
                           packed_vt.options());
    acc_t* const dv_t = scratch.allocate(tiles * kTileKeys * n);  // (tiles, n, 64)
    acc_t *const do_rows = scratch.allocate(height * n), *const do_t = scratch.allocate(height * n);
    acc_t* const rows_p = scratch.allocate(tiles * kTileKeys * height);
    acc_t* const rows_dp = scratch.allocate(tiles * kTileKeys * height);
    acc_t *const delta = scratch.allocate(height), *const sums = scratch.allocate(height);
    acc_t* const maxima = scratch.allocate(height);
    std::fill_n(dv_t, tiles * kTileKeys * n, acc_t(0));
    const acc_t* vt =
        packed_vt.const_data_ptr<acc_t>() + (b * a.nheads + h) * tiles * kTileKeys * n;
    const auto scale = static_cast<acc_t>(a.scale);
    for (int64_t index = 0; index < a.blocks(); ++index) {
      const QueryBlock block(a, b, index);
      for (int64_t r = 0; r < block.rows; ++r) {
        T* const to = ds.row(b, h, block.row + r);
        if (!block.sees(r)) {
          std::fill_n(to, a.seqlen_k, T(0));
          continue;
        }
        std::fill_n(to, seen.begin + block.begin[r], T(0));
        std::fill(to + seen.begin + block.end[r], to + a.seqlen_k, T(0));
      }
      if (!block.empty()) {
        pack_rows<T, acc_t>(do_rows, height, d_out.row(b, h, block.row), block.rows, n,
                            d_out.row_stride, d_out.column_stride);
        for (int64_t r = 0; r < block.rows; ++r) {
          if (!block.sees(r)) std::fill_n(do_rows + r * n, n, acc_t(0));
        }
        row_deltas<T, acc_t>(delta, do_rows, o, nullptr, b, h, block, n);
      }
      if (sink_terms.defined()) {
        sink_terms.mutable_data_ptr<acc_t>()[b * a.nheads + h] +=
            sink_gradient<acc_t>(a.template sink<acc_t>(h), delta, l, nullptr, b, h, block);
      }
      if (block.empty()) continue;
      pack_transposed<acc_t, acc_t>(do_t, height, do_rows, height, n, n, 1);
      softmax_of_rows(a, block, s, b, h, rows_p, sums, maxima);
      const int64_t size = height * kTileKeys;
      for (int64_t t = 0; t < block.tiles(); ++t) {
        block_matmul(rows_dp + t * size, do_rows, vt + (block.tile_begin + t) * kTileKeys * n,
                     height, kTileKeys, n, /*add=*/false);
      }
      with_vectors([&] {
        for (int64_t r = 0; r < block.rows; ++r) {
          if (!block.sees(r)) continue;
          const acc_t row_lse = *l.row(b, h, block.row + r);
          const bool own = is_own_lse(maxima[r], sums[r], row_lse);
          const acc_t factor = own ? 1 / sums[r] : std::exp(maxima[r] - row_lse);
          double own_delta = 0;
          for (int64_t t = 0; t < block.tiles(); ++t) {
            const KeyRange live = live_columns(block, r, block.tile_begin + t);
            if (live.empty()) continue;
            const int64_t at = t * size + r * kTileKeys + live.begin, count = live.end - live.begin;
            for (int64_t j = 0; j < count; ++j) rows_p[at + j] *= factor;
            own_delta += static_cast<double>(dot<acc_t>(rows_p + at, rows_dp + at, count));
          }
          const acc_t row_delta = own ? static_cast<acc_t>(own_delta) : delta[r];
          const auto cap = static_cast<acc_t>(a.softcap);
          for (int64_t t = 0; t < block.tiles(); ++t) {
            const KeyRange live = live_columns(block, r, block.tile_begin + t);
            const int64_t first = seen.begin + (block.tile_begin + t) * kTileKeys + live.begin;
            const T* from = s.row(b, h, block.row + r) + first;
            T* const to = ds.row(b, h, block.row + r) + first;
            const acc_t* p = rows_p + t * size + r * kTileKeys + live.begin;
            acc_t* dp = rows_dp + t * size + r * kTileKeys + live.begin;
            const int64_t count = live.end - live.begin;
            for (int64_t j = 0; j < count; ++j) dp[j] = p[j] * (dp[j] - row_delta) * scale;
            for (int64_t j = 0; a.softcap > 0 && j < count; ++j) {
              const acc_t tanh = tanh_in_vectors(static_cast<acc_t>(from[j]) * scale / cap);
              dp[j] *= 1 - tanh * tanh;
            }
            for (int64_t j = 0; j < count; ++j) to[j] = static_cast<T>(dp[j]);
          }
        }
      });
      for (int64_t t = block.tile_begin; t < block.tile_end; ++t) {
        const acc_t* p = rows_p + (t - block.tile_begin) * size;
        block_matmul(dv_t + t * kTileKeys * n, do_t, p, n, kTileKeys, height, /*add=*/true);
      }
    }
    with_vectors([&] {
      for (int64_t j = 0; j < a.seqlen_k; ++j) {
        T* const to = dv.row(b, h, j);
        if (j < seen.begin || j >= seen.end) {
          std::fill_n(to, n, T(0));
          continue;
        }
        const int64_t key = j - seen.begin;
        const acc_t* from = dv_t + key / kTileKeys * kTileKeys * n + key % kTileKeys;
        for (int64_t c = 0; c < n; ++c) to[c] = static_cast<T>(from[c * kTileKeys]);
      }
    });
  });
  add_sink_terms(dsink, sink_terms);
}

}  // namespace torchweld
