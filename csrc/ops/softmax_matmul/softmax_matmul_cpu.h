// CPU: softmax_matmul and its gradient, a block of query rows at a time, in tiles (rows, 64 keys)
// that stay in cache. A head's gradient is one task: its sums are added in one order whatever the
// number of threads.
#pragma once

#include "core/attention_tiles_cpu.h"

namespace torchweld {

// The block's live keys in a row, from the block's first key on; 0 for a row that sees nothing.
inline int64_t live_keys(const CpuAttention& a, const QueryBlock& block, int64_t r) {
  if (r < block.dead) return 0;
  return a.rule.live(block.row + r, block.key).end - block.key;
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
    const acc_t lowest = -std::numeric_limits<acc_t>::infinity();
    acc_t* const lse_to =
        lse ? lse->mutable_data_ptr<acc_t>() + (b * a.nheads + h) * a.seqlen_q + block.row
            : nullptr;
    Scratch<acc_t> scratch(height * (n + block.tiles * kTileKeys + 1), packed_v.options());
    acc_t *const sums = scratch.take(height), *const rows_out = scratch.take(height * n);
    acc_t* const p = scratch.next;
    const auto scale = static_cast<acc_t>(a.scale);
    with_vectors([&] {
      std::fill_n(p, block.tiles * kTileKeys * height, acc_t(0));
      for (int64_t r = block.dead; r < block.rows; ++r) {
        const T* from = s.row(b, h, block.row + r) + block.key;
        const int64_t keys = live_keys(a, block, r);
        const auto each_tile = [&](const auto& body) {
          for (int64_t t = 0; t * kTileKeys < keys; ++t) {
            const int64_t count = std::min(kTileKeys, keys - t * kTileKeys);
            acc_t* const to = p + (t * height + r) * kTileKeys;
            body(t, to, count);
          }
        };
        acc_t max = lowest, sum = 0;
        each_tile([&](int64_t t, acc_t* to, int64_t count) {
          for (int64_t j = 0; j < count; ++j) {
            to[j] = static_cast<acc_t>(from[t * kTileKeys + j]) * scale;
          }
          const acc_t most = max_of(to, count);
          max = max > most ? max : most;
        });
        each_tile(
            [&](int64_t t, acc_t* to, int64_t count) { sum += exp_and_sum(to, to, count, max); });
        sums[r] = sum;
        if (lse_to) lse_to[r] = std::log(sum) + max;
      }
    });
    const acc_t* v =
        packed_v.const_data_ptr<acc_t>() + (b * a.nheads + h) * a.tiles() * kTileKeys * n;
    for (int64_t t = 0; t < block.tiles; ++t) {
      block_matmul(rows_out, p + t * height * kTileKeys, v + t * kTileKeys * n, height, n,
                   kTileKeys,
                   /*add=*/t > 0);
    }
    with_vectors([&] {
      for (int64_t r = 0; r < block.rows; ++r) {
        T* const to = o.row(b, h, block.row + r);
        if (r < block.dead) {
          std::fill_n(to, n, T(0));
          if (lse_to) lse_to[r] = lowest;
          continue;
        }
        for (int64_t c = 0; c < n; ++c) to[c] = static_cast<T>(rows_out[r * n + c] / sums[r]);
      }
    });
  });
}

template <typename T>
void softmax_matmul_backward_tiles(const CpuAttention& a, const Tensor& dscores,
                                   const Tensor& dvalue, const Tensor& dout, const Tensor& scores,
                                   const Tensor& value, const Tensor& out, const Tensor& lse) {
  using acc_t = at::opmath_type<T>;
  const Tensor packed_vt = pack_tiles<T, acc_t>(a, value, /*transposed=*/true);
  const CpuHeads<T> s(scores), o(out), d_out(dout), ds(dscores), dv(dvalue);
  const CpuHeads<acc_t> l(lse);
  const int64_t height = a.block_rows(), n = a.head_dim_v, tiles = a.tiles();
  // A thread's half of the tasks holds heads of all sequences.
  parallel_tasks(a.batch * a.nheads, [&](int64_t task) {
    const int64_t b = task % a.batch, h = task / a.batch, pad = a.pad(b);
    Scratch<acc_t> scratch(tiles * kTileKeys * n + height * (2 * n + 2 * kTileKeys + 1),
                           packed_vt.options());
    acc_t* const dv_t = scratch.take(tiles * kTileKeys * n);  // (tiles, n, 64)
    acc_t *const do_rows = scratch.take(height * n), *const do_t = scratch.take(height * n);
    acc_t *const p = scratch.take(height * kTileKeys), *const dp = scratch.take(height * kTileKeys);
    acc_t* const delta = scratch.take(height);
    std::fill_n(dv_t, tiles * kTileKeys * n, acc_t(0));
    const acc_t* vt =
        packed_vt.const_data_ptr<acc_t>() + (b * a.nheads + h) * tiles * kTileKeys * n;
    const auto scale = static_cast<acc_t>(a.scale);
    for (int64_t index = 0; index < a.blocks(); ++index) {
      const QueryBlock block(a, b, index);
      const int64_t live = block.rows - block.dead;
      for (int64_t r = 0; r < block.rows; ++r) {
        T* const to = ds.row(b, h, block.row + r);
        const int64_t keys = live_keys(a, block, r);
        std::fill_n(to, keys ? pad : a.seqlen_k, T(0));
        if (keys) std::fill_n(to + pad + keys, a.seqlen_k - pad - keys, T(0));
      }
      if (live == 0) continue;
      std::fill_n(do_rows, height * n, acc_t(0));
      pack_rows<T, acc_t>(do_rows + block.dead * n, live, d_out.row(b, h, block.row + block.dead),
                          live, n, d_out.row_stride, d_out.column_stride);
      pack_transposed<acc_t, acc_t>(do_t, height, do_rows, height, n, n, 1);
      row_deltas(delta, do_rows, o, b, h, block, n);
      for (int64_t t = 0; t < block.tiles; ++t) {
        block_matmul(dp, do_rows, vt + t * kTileKeys * n, height, kTileKeys, n, /*add=*/false);
        with_vectors([&] {
          std::fill_n(p, height * kTileKeys, acc_t(0));
          for (int64_t r = block.dead; r < block.rows; ++r) {
            const int64_t first = t * kTileKeys;
            const int64_t count = std::min(kTileKeys, live_keys(a, block, r) - first);
            const T* from = s.row(b, h, block.row + r) + pad + first;
            T* const to = ds.row(b, h, block.row + r) + pad + first;
            const acc_t row_lse = *l.row(b, h, block.row + r), row_delta = delta[r];
            acc_t *const p_row = p + r * kTileKeys, *const dp_row = dp + r * kTileKeys;
            for (int64_t j = 0; j < count; ++j) p_row[j] = static_cast<acc_t>(from[j]) * scale;
            for (int64_t j = 0; j < count; ++j) {
              p_row[j] = exp_in_vectors(p_row[j] - row_lse);
              dp_row[j] = p_row[j] * (dp_row[j] - row_delta) * scale;
            }
            for (int64_t j = 0; j < count; ++j) to[j] = static_cast<T>(dp_row[j]);
          }
        });
        block_matmul(dv_t + t * kTileKeys * n, do_t, p, n, kTileKeys, height, /*add=*/true);
      }
    }
    for (int64_t j = 0; j < pad; ++j) std::fill_n(dv.row(b, h, j), n, T(0));
    with_vectors([&] {
      for (int64_t j = pad; j < a.seqlen_k; ++j) {
        const acc_t* from = dv_t + (j - pad) / kTileKeys * kTileKeys * n + (j - pad) % kTileKeys;
        T* const to = dv.row(b, h, j);
        for (int64_t c = 0; c < n; ++c) to[c] = static_cast<T>(from[c * kTileKeys]);
      }
    });
  });
}

}  // namespace torchweld
