// CPU: the matmuls of attention's forward, for blocks of query rows as vector lanes. Operands have
// the dtype of the statistics, or bf16 if the CPU multiplies bf16 tiles. The sums are fp32 in both
// cases.
#pragma once

#include "attention/cpu/tiles.h"

namespace torchweld {

// Multiplies packed keys and values by operands (columns, width), whose columns are query rows.
template <typename acc_t, typename E = acc_t>
struct LaneProducts {
  int64_t width, head_dim, head_dim_v;
  acc_t* query;  // (head_dim, width), times the scale

  // The number of elements of scratch memory that the products need.
  static int64_t scratch_size(int64_t width, int64_t head_dim) { return head_dim * width; }

  LaneProducts(const CpuAttention& a, Scratch<acc_t>& scratch)
      : width(a.block_rows()),
        head_dim(a.head_dim),
        head_dim_v(a.head_dim_v),
        query(scratch.allocate(scratch_size(width, head_dim))) {}

  template <typename T>
  void pack_query(const T* rows, int64_t count, const CpuHeads<T>& q, acc_t scale) {
    pack_transposed<T, acc_t>(query, width, rows, count, head_dim, q.row_stride, q.column_stride,
                              scale);
  }
  // Computes scores (keys, width) = k (keys, head_dim) @ query.
  void multiply_keys(acc_t* scores, const acc_t* k, int64_t keys) const {
    block_matmul(scores, k, query, keys, width, head_dim, /*add=*/false);
  }
  // Computes out (head_dim_v, width) = vt (head_dim_v, keys) @ p (keys, width), or adds this
  // product to `out`. The rows of vt are kTileKeys elements apart.
  void multiply_values(acc_t* out, const acc_t* vt, const acc_t* p, int64_t keys, bool add) const {
    block_matmul(out, vt, p, head_dim_v, width, keys, add, kTileKeys);
  }
};

// NOTE: probabilities rounded to bf16 would cost three decimal digits. Therefore a probability is
// the sum of two bf16 numbers, and the values are multiplied by both.
template <>
struct LaneProducts<float, c10::BFloat16> {
  int64_t width, head_dim, head_dim_v;
  float scale = 1;
  uint32_t* query;       // a tile of a PairedView: (head_dim / 2, kColumns) pairs
  uint32_t *high, *low;  // the two summands of p: (kTileKeys / 2, width) pairs

  static constexpr int64_t kColumns = PairedView::kTileColumns;

  static int64_t scratch_size(int64_t width, int64_t head_dim) {
    return head_dim * kColumns / 2 + kTileKeys * width;
  }

  LaneProducts(const CpuAttention& a, Scratch<float>& scratch)
      : width(a.block_rows()), head_dim(a.head_dim), head_dim_v(a.head_dim_v) {
    query = reinterpret_cast<uint32_t*>(scratch.allocate(scratch_size(width, head_dim)));
    high = query + head_dim / 2 * kColumns;
    low = high + kTileKeys / 2 * width;
  }

  void pack_query(const c10::BFloat16* rows, int64_t count, const CpuHeads<c10::BFloat16>& q,
                  float query_scale) {
    scale = query_scale;
    const auto* from = reinterpret_cast<const uint16_t*>(rows);
    with_vectors([&] {
      auto* const to = reinterpret_cast<uint16_t*>(query);
      if (count < width) std::fill_n(to, head_dim * kColumns, uint16_t{0});
      if (q.column_stride == 1) {
        pair_transposed(to, from, q.row_stride, head_dim, count);
      } else {
        pair_rows(to, from, q.column_stride, q.row_stride, head_dim, count);
      }
    });
  }
  void multiply_keys(float* scores, const c10::BFloat16* k, int64_t keys) const {
    multiply_tile({scores, width}, {k, head_dim}, bf16_view(query, kColumns), keys, width, head_dim,
                  /*add=*/false);
    with_vectors([&] {
      for (int64_t i = 0; i < keys * width; ++i) scores[i] *= scale;
    });
  }
  void multiply_values(float* out, const c10::BFloat16* vt, const float* p, int64_t keys,
                       bool add) const {
    with_vectors([&] {
      for (int64_t j = 0; j < keys; j += 2) {
        const float* const row = p + j * width;
        for (int64_t r = 0; r < width; ++r) {
          uint32_t first_high, first_low, second_high, second_low;
          split_to_bf16(row[r], first_high, first_low);
          split_to_bf16(row[width + r], second_high, second_low);
          high[j / 2 * width + r] = first_high | second_high << 16;
          low[j / 2 * width + r] = first_low | second_low << 16;
        }
      }
    });
    for (const uint32_t* const summand : {high, low}) {
      multiply_tile({out, width}, {vt, kTileKeys}, bf16_view(summand, width), head_dim_v, width,
                    keys, add || summand == low);
    }
  }

 private:
  static MatrixView<const c10::BFloat16> bf16_view(const uint32_t* pairs, int64_t stride) {
    return {reinterpret_cast<const c10::BFloat16*>(pairs), stride};
  }
};

}  // namespace torchweld
