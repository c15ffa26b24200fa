// CPU: y = x @ W^T + bias in bfloat16 with AVX-512 BF16. Each group has a table of sixteen values:
// scale * (code - zero), rounded to bfloat16. A nibble of the weight is an index into the table.
// One instruction looks up 32 values. The looked-up columns are not reordered. Instead, x is
// permuted to the order of the lookups.
//
// For a few rows of x the weight stays packed. A task then multiplies x by 64 weight rows. The task
// iterates over slices of K, so that x of a slice fits into the L1 cache. For more rows of x, a
// task dequantises a block of the weight and torch multiplies it.
#pragma once

#include <ATen/ops/addmm.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include <vector>

#include "core/check.h"
#include "core/parallel.h"
#include "core/simd_cpu.h"
#include "int4/cpu/rows.h"

#ifdef TW_SIMD_TARGETS
#include <immintrin.h>
#define TW_BF16_TARGET \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,prefer-vector-width=512")))
#endif

namespace torchweld {

// Computes columns of y: y[:, row:row + R] = x @ block^T + bias[row:row + R]. `block` holds R rows
// of the weight, from row `row` on.
inline void int4_block_matmul(const Tensor& y, const Tensor& x, const Tensor& block,
                              const OptionalTensor& bias, int64_t row) {
  Tensor out = y.narrow(1, row, block.size(0));
  if (is_given(bias)) {
    at::addmm_out(out, bias->narrow(0, row, block.size(0)), x, block.t());
  } else {
    at::mm_out(out, x, block.t());
  }
}

// The maximum number of rows of x for which the weight stays packed. With more rows, it is faster
// to dequantise the weight.
constexpr int64_t kInt4FewBf16Rows = 48;

#ifdef TW_SIMD_TARGETS
inline bool has_bf16_products() {
  static const bool has = simd_level() == 2 && __builtin_cpu_supports("avx512bf16");
  return has;
}

// The word order of the portable layout. 16 words of a row hold 128 columns. Each half of a word
// holds four contiguous columns.
struct PortableInt4Words {
  static constexpr int kColumns = 128, kVectors = 4, kShift = 4, kStepWords = 16;
  const PortableInt4& weight;

  int64_t steps() const { return weight.shape.k / kColumns; }
  const uint32_t* words(int64_t row) const { return weight.words(row, 0, 0, nullptr); }
  int first_shift(int64_t) const { return 0; }
  // Permutes x from (rows, K) to (rows, steps, vectors, 32).
  static Tensor in_order(const Tensor& x) {
    return x.view({x.size(0), -1, 32, kVectors}).transpose(2, 3);
  }
};

// The word order of the repacked layout. For each g from 0 to 7, a chunk has 16 words that hold 64
// columns of rows g and g + 8. With s and t from 0 to 3, the word with index 4 t + s among these 16
// words holds columns 16 s + 2 t + j for j = 0, 1, 8 and 9.
struct RepackedInt4Words {
  static constexpr int kColumns = kInt4ChunkK, kVectors = 2, kShift = 8,
                       kStepWords = kInt4ChunkWords;
  const RepackedInt4& weight;

  int64_t steps() const { return weight.shape.chunks(); }
  const uint32_t* words(int64_t row) const {
    const int64_t chunk = row / kInt4TileRows * weight.shape.chunks();
    return weight.word_data + chunk * kInt4ChunkWords + row % 8 * 16;
  }
  int first_shift(int64_t row) const { return row % kInt4TileRows < 8 ? 0 : 4; }
  static Tensor in_order(const Tensor& x) {
    return x.view({x.size(0), -1, 4, kVectors, 4, 2})
        .permute({0, 1, 3, 4, 2, 5})
        .reshape({x.size(0), -1, kVectors, 32});
  }
};

inline PortableInt4Words int4_words(const PortableInt4& weight) { return {weight}; }
inline RepackedInt4Words int4_words(const RepackedInt4& weight) { return {weight}; }

// Rows [first, end) of the weight, with one lookup table for each group of each row.
template <typename Words>
struct Int4Bf16Rows {
  static constexpr int kLanes = 16;
  const Words& from;
  int64_t first, end;
  std::vector<uint16_t> tables;  // (rows, groups, 16): the bf16 value of every code in every group

  Int4Bf16Rows(const Words& from, int64_t first, int64_t rows)
      : from(from),
        first(first),
        end(std::min(from.weight.shape.n, first + rows)),
        tables((end - first) * from.weight.shape.groups * kLanes) {
    fill_tables();
  }

  TW_BF16_TARGET void fill_tables() {
    const auto& weight = from.weight;
    const at::BFloat16* scales = weight.scales.template const_data_ptr<at::BFloat16>();
    const __m512 codes = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    uint16_t* to = tables.data();
    for (int64_t row = first; row < end; ++row) {
      for (int64_t group = 0; group < weight.shape.groups; ++group, to += kLanes) {
        const __m512 zero = _mm512_set1_ps(static_cast<float>(weight.zero(row, group)));
        const __m512 scale =
            _mm512_set1_ps(static_cast<float>(scales[weight.scale_at(row, group)]));
        const __m512 values = _mm512_mul_ps(_mm512_sub_ps(codes, zero), scale);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                            reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(values)));
      }
    }
  }

  // Dequantises the rows to (rows, steps, vectors, 32).
  TW_BF16_TARGET void write(at::BFloat16* to) const {
    const auto& weight = from.weight;
    const int64_t group_steps = weight.shape.group_units() * kInt4Unit / Words::kColumns;
    const uint16_t* next_table = tables.data();
    for (int64_t row = first; row < end; ++row) {
      const uint32_t* words = from.words(row);
      const __m128i shift = _mm_cvtsi32_si128(from.first_shift(row));
      int64_t step = 0;
      for (int64_t group = 0; group < weight.shape.groups; ++group, next_table += kLanes) {
        const __m512i table = lookup_table(next_table);
        const int64_t end_step = std::min(step + group_steps, from.steps());
        for (; step < end_step; ++step) {
          const __m512i codes =
              _mm512_srl_epi16(_mm512_loadu_si512(words + step * Words::kStepWords), shift);
#pragma GCC unroll 4
          for (int v = 0; v < Words::kVectors; ++v, to += 32) {
            _mm512_storeu_si512(
                to, _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, Words::kShift * v), table));
          }
        }
      }
    }
  }

  // Returns a register with two copies of the 16-entry table. A lookup uses five bits of an index.
  // The highest of them only selects the copy, so it does not change the result.
  static TW_BF16_TARGET inline __m512i lookup_table(const uint16_t* table) {
    return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(table)));
  }

  // Multiplies x by rows [row, row + kRowBlock) of the weight, over groups [group_begin,
  // group_end). Adds the products to sums (kRowBlock, kXRows, 16). If some of these rows lie behind
  // the last row (end - 1), the function uses the last row in their place.
  template <int kXRows, int kRowBlock>
  TW_BF16_TARGET void add(float* sums, const at::BFloat16* x, int64_t row, int64_t group_begin,
                          int64_t group_end) const {
    const auto& weight = from.weight;
    const int64_t group_steps = weight.shape.group_units() * kInt4Unit / Words::kColumns;
    __m512 acc[kRowBlock][kXRows];
    const uint16_t* table_of[kRowBlock];
    const uint32_t* words_of[kRowBlock];
    __m128i shift[kRowBlock];
#pragma GCC unroll 16
    for (int t = 0; t < kRowBlock; ++t) {
      const int64_t source = row + t < end ? row + t : end - 1;
      table_of[t] = tables.data() + (source - first) * weight.shape.groups * kLanes;
      words_of[t] = from.words(source);
      shift[t] = _mm_cvtsi32_si128(from.first_shift(source));
#pragma GCC unroll 16
      for (int r = 0; r < kXRows; ++r) {
        acc[t][r] = _mm512_loadu_ps(sums + (t * kXRows + r) * kLanes);
      }
    }
    int64_t step = group_begin * group_steps;
    for (int64_t group = group_begin; group < group_end; ++group) {
      __m512i table[kRowBlock];
#pragma GCC unroll 16
      for (int t = 0; t < kRowBlock; ++t) {
        table[t] = lookup_table(table_of[t] + group * kLanes);
      }
      for (int64_t end_step = std::min(step + group_steps, from.steps()); step < end_step; ++step) {
        __m512i words[kRowBlock];
#pragma GCC unroll 16
        for (int t = 0; t < kRowBlock; ++t) {
          words[t] = _mm512_srl_epi16(_mm512_loadu_si512(words_of[t] + step * Words::kStepWords),
                                      shift[t]);
        }
        const at::BFloat16* columns = x + step * Words::kColumns * kXRows;
#pragma GCC unroll 4
        for (int v = 0; v < Words::kVectors; ++v) {
          __m512bh values[kRowBlock];
#pragma GCC unroll 16
          for (int t = 0; t < kRowBlock; ++t) {
            values[t] = reinterpret_cast<__m512bh>(
                _mm512_permutexvar_epi16(_mm512_srli_epi16(words[t], Words::kShift * v), table[t]));
          }
#pragma GCC unroll 16
          for (int r = 0; r < kXRows; ++r) {
            const auto column =
                reinterpret_cast<__m512bh>(_mm512_loadu_si512(columns + (v * kXRows + r) * 32));
#pragma GCC unroll 16
            for (int t = 0; t < kRowBlock; ++t) {
              acc[t][r] = _mm512_dpbf16_ps(acc[t][r], values[t], column);
            }
          }
        }
      }
    }
#pragma GCC unroll 16
    for (int t = 0; t < kRowBlock; ++t) {
#pragma GCC unroll 16
      for (int r = 0; r < kXRows; ++r) {
        _mm512_storeu_ps(sums + (t * kXRows + r) * kLanes, acc[t][r]);
      }
    }
  }

  // Computes y for x (steps, vectors, kXRows, 32). Only the first `rows` of the kXRows rows are
  // valid.
  template <int kXRows>
  void run(at::BFloat16* y, const at::BFloat16* x, int64_t rows, const at::BFloat16* bias,
           int64_t bias_stride) const {
    // The number of weight rows per register tile. The number of vector registers limits kRowBlock.
    constexpr int kRowBlock = kXRows == 8 ? 3 : 4;
    constexpr int64_t kCacheBytes = 32 << 10;
    const auto& shape = from.weight.shape;
    const int64_t group_bytes = shape.group_units() * kInt4Unit * kXRows * 2;
    const int64_t cached_groups = std::max<int64_t>(1, kCacheBytes / group_bytes);
    std::vector<float> sums((end - first + kRowBlock) * kXRows * kLanes);
    for (int64_t group = 0; group < shape.groups; group += cached_groups) {
      for (int64_t row = first; row < end; row += kRowBlock) {
        add<kXRows, kRowBlock>(sums.data() + (row - first) * kXRows * kLanes, x, row, group,
                               std::min(shape.groups, group + cached_groups));
      }
    }
    with_vectors([&] {
      for (int64_t row = first; row < end; ++row) {
        const float shift = bias ? static_cast<float>(bias[row * bias_stride]) : 0.0f;
        for (int64_t r = 0; r < rows; ++r) {
          LaneSums<float> total;
          std::memcpy(total.lanes, &sums[((row - first) * kXRows + r) * kLanes],
                      sizeof(total.lanes));
          y[r * shape.n + row] = static_cast<at::BFloat16>(total.total() + shift);
        }
      }
    });
  }
};
#endif

// Whether int4_bf16_into supports the call. It requires a group size that is a multiple of the
// number of columns in 16 words.
template <typename Weight>
bool supports_int4_bf16(const Tensor& x, const Weight& weight) {
#ifdef TW_SIMD_TARGETS
  constexpr int kColumns = decltype(int4_words(weight))::kColumns;
  return x.scalar_type() == at::kBFloat16 &&
         weight.shape.group_units() * kInt4Unit % kColumns == 0 && has_bf16_products();
#else
  return false;
#endif
}

// Computes y (rows, N) = x (rows, K) @ W^T + bias. If the weight is dequantised, block_rows is the
// number of weight rows per block.
template <typename Weight>
void int4_bf16_into(const Tensor& y, const Tensor& x, const Weight& weight,
                    const OptionalTensor& bias, int64_t block_rows) {
#ifdef TW_SIMD_TARGETS
  const auto from = int4_words(weight);
  using Rows = Int4Bf16Rows<std::decay_t<decltype(from)>>;
  const int64_t n = weight.shape.n, rows = x.size(0), columns = from.steps() * from.kColumns;
  const auto in_order = [&](int64_t first, int64_t count, int64_t width) {
    const Tensor x_rows = x.narrow(0, first, count);
    const Tensor padded = at::constant_pad_nd(x_rows, {0, columns - x.size(1), 0, width - count});
    return from.in_order(padded.contiguous());
  };
  if (rows > kInt4FewBf16Rows) {
    const Tensor ordered = in_order(0, rows, rows).reshape({rows, columns});
    parallel_tasks((n + block_rows - 1) / block_rows, [&](int64_t task) {
      const Rows block(from, task * block_rows, block_rows);
      const Tensor values = at::empty({block.end - block.first, columns}, x.options());
      block.write(values.mutable_data_ptr<at::BFloat16>());
      int4_block_matmul(y, ordered, values, bias, block.first);
    });
    return;
  }
  // The number of weight rows per task, and the maximum number of x rows per tile.
  constexpr int64_t kTaskRows = 64, kMaxRows = 8;
  std::vector<Tensor> x_tiles;  // each is (steps, vectors, rows, 32) with 1, 2, 4 or 8 rows
  for (int64_t first = 0; first < rows; first += kMaxRows) {
    const int64_t count = std::min(kMaxRows, rows - first);
    x_tiles.push_back(
        in_order(first, count, int4_row_count(count)).permute({1, 2, 0, 3}).contiguous());
  }
  at::BFloat16* const to = y.mutable_data_ptr<at::BFloat16>();
  const at::BFloat16* shifts = is_given(bias) ? bias->const_data_ptr<at::BFloat16>() : nullptr;
  const int64_t stride = shifts ? bias->stride(0) : 0;
  parallel_tasks((n + kTaskRows - 1) / kTaskRows, [&](int64_t index) {
    const Rows task(from, index * kTaskRows, kTaskRows);
    for (size_t i = 0; i < x_tiles.size(); ++i) {
      const int64_t first = int64_t(i) * kMaxRows, count = std::min(kMaxRows, rows - first);
      const at::BFloat16* data = x_tiles[i].const_data_ptr<at::BFloat16>();
      at::BFloat16* const y_rows = to + first * n;
      switch (x_tiles[i].size(2)) {
        case 1:
          task.template run<1>(y_rows, data, count, shifts, stride);
          break;
        case 2:
          task.template run<2>(y_rows, data, count, shifts, stride);
          break;
        case 4:
          task.template run<4>(y_rows, data, count, shifts, stride);
          break;
        default:
          task.template run<8>(y_rows, data, count, shifts, stride);
      }
    }
  });
#endif
}

}  // namespace torchweld
