// CPU: blocks of query rows and packed tiles of 64 keys, for attention and softmax_matmul. The
// first tile of a sequence starts at the first key that a row of the sequence sees.
#pragma once

#include <ATen/OpMathType.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "attention/cpu/scores.h"
#include "attention/mask_arguments.h"
#include "core/batch_invariance.h"
#include "core/matmul_cpu.h"
#include "core/parallel.h"
#include "core/simd_cpu.h"
#include "core/transpose_cpu.h"

#ifdef __SSE__
#include <xmmintrin.h>
#endif

namespace torchweld {

constexpr int64_t kTileKeys = 64;

// The address and the strides of a tensor (batch, heads, rows, columns).
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

// While an object exists, its thread computes 0 in place of subnormal numbers, if `flushes` is
// true. Under ALiBi the sums of a row begin with those of far keys, which are subnormal. Each
// operation on such numbers costs over 100 cycles.
class SubnormalFlush {
 public:
#ifdef __SSE__
  explicit SubnormalFlush(bool flushes) : saved_(_mm_getcsr()) {
    constexpr unsigned kFlushToZero = 0x8000, kDenormalsAreZero = 0x40;
    if (flushes) _mm_setcsr(saved_ | kFlushToZero | kDenormalsAreZero);
  }
  ~SubnormalFlush() { _mm_setcsr(saved_); }
#else
  explicit SubnormalFlush(bool) {}
#endif
  SubnormalFlush(const SubnormalFlush&) = delete;

 private:
  [[maybe_unused]] unsigned saved_ = 0;
};

// The sizes, the mask and the scale of a call of attention or softmax_matmul. softmax_matmul has
// scores instead of query and key.
struct CpuAttention : CpuScores {
  int64_t batch, nheads, nheads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v;
  std::vector<KeyRange> seen;  // for each sequence: the range from the first to the last seen key
  Tensor bias;  // (batch, nheads, seqlen_q, seqlen_k) in the dtype of the statistics, or undefined
  Tensor slopes;  // (nheads,) in the dtype of the statistics, at least 0, or undefined
  // For each sequence: the ranges of keys inside `seen` that no row sees.
  std::vector<std::vector<KeyRange>> gaps;

  CpuAttention(const Tensor& query, const Tensor& key, const Tensor& value, const Mask& args,
               double scale)
      : CpuAttention(query.size(0), query.size(1), key.size(1), query.size(2), key.size(2),
                     query.size(3), value.size(3), args, scale, acc_dtype(query)) {}

  CpuAttention(const Tensor& scores, const Tensor& value, const Mask& args, double scale)
      : CpuAttention(scores.size(0), scores.size(1), scores.size(1), scores.size(2), scores.size(3),
                     0, value.size(3), args, scale, acc_dtype(scores)) {}

  // Calls with few query rows use attention_forward_rows, which does not pack keys. For so few
  // rows, packing takes longer than it saves. Its sums have another order than those of tiles, so
  // the batch-invariant mode has tiles for every number of rows.
  bool has_few_rows() const { return seqlen_q <= 8 && !is_batch_invariant(); }
  int64_t group() const { return nheads / std::max<int64_t>(1, nheads_kv); }
  int64_t tiles() const { return (seqlen_k + kTileKeys - 1) / kTileKeys; }
  // The number of query rows in a block. Under causal, a block computes scores for all keys that
  // its last row sees. Many of these keys are hidden from the first rows of the block, so short
  // sequences have small blocks. Long key sequences also have small blocks, so that the scores stay
  // in the cache.
  int64_t block_rows() const {
    const bool small = seqlen_q <= 16 || seqlen_k > 8192;
    return small ? 16 : (seqlen_q <= 32 || (mask.causal && seqlen_q <= 256)) ? 32 : 64;
  }
  int64_t blocks() const { return (seqlen_q + block_rows() - 1) / block_rows(); }

 private:
  CpuAttention(int64_t batch, int64_t nheads, int64_t nheads_kv, int64_t seqlen_q, int64_t seqlen_k,
               int64_t head_dim, int64_t head_dim_v, const Mask& args, double scale,
               at::ScalarType acc)
      : CpuScores(args, seqlen_q, seqlen_k, scale, acc),
        batch(batch),
        nheads(nheads),
        nheads_kv(nheads_kv),
        seqlen_q(seqlen_q),
        seqlen_k(seqlen_k),
        head_dim(head_dim),
        head_dim_v(head_dim_v) {
    if (is_given(args.bias)) {
      bias = args.bias->to(acc).expand({batch, nheads, seqlen_q, seqlen_k});
    }
    if (is_given(args.alibi_slopes)) slopes = args.alibi_slopes->to(acc).clamp_min(0).contiguous();
    for (int64_t b = 0; b < batch; ++b) {
      seen.push_back(keys_of_rows(b, 0, seqlen_q));
      bool may_have_gaps = mask.key_start || mask.has_row_ends;
      if (is_batch_invariant() && !seen[b].empty()) {
        // A tile then has the same keys for every set of rows.
        const int64_t before = (seen[b].begin - first_start_of(b)) % kTileKeys;
        seen[b].begin -= before;
        may_have_gaps |= before > 0;
      }
      gaps.push_back(may_have_gaps ? gaps_of(b) : std::vector<KeyRange>());
    }
  }

  // Returns the end of the padding, or the first key_start of a row that sees a key.
  int64_t first_start_of(int64_t b) const {
    const SequenceMask sequence = mask.sequence(b);
    int64_t first = sequence.key_start ? seqlen_k : 0;
    for (int64_t i = 0; sequence.key_start && i < seqlen_q; ++i) {
      if (mask.row_keys(i, sequence).empty()) continue;
      first = std::min<int64_t>(first, sequence.key_start[i]);
    }
    return std::max(first, sequence.pad);
  }

  std::vector<KeyRange> gaps_of(int64_t b) const {
    const SequenceMask sequence = mask.sequence(b);
    // change[j] is the number of rows that see key j minus the number that see key j - 1.
    std::vector<int64_t> change(seqlen_k + 1);
    for (int64_t i = 0; i < seqlen_q; ++i) {
      const KeyRange keys = mask.row_keys(i, sequence);
      if (!keys.empty()) ++change[keys.begin], --change[keys.end];
    }
    std::vector<KeyRange> gaps;
    int64_t rows = 0;
    for (int64_t j = seen[b].begin; j < seen[b].end; ++j) {
      rows += change[j];
      if (rows > 0) continue;
      if (gaps.empty() || gaps.back().end < j) gaps.push_back({j, j});
      gaps.back().end = j + 1;
    }
    return gaps;
  }
};

// Returns scale * x in the dtype of the scale. If this dtype is x's, 16-bit, the scale is 1.
template <typename acc_t, typename T>
acc_t scaled(const T& x, acc_t scale) {
  if constexpr (sizeof(acc_t) == sizeof(uint16_t)) {
    return x;
  } else {
    return static_cast<acc_t>(x) * scale;
  }
}

// Sets `to` (columns, width) to `scale` times the transpose of `from` (rows, columns). Sets columns
// [rows, width) of `to` to zero. If the dtype of `to` has 16 bits, `from` has this dtype, and the
// scale must be 1.
template <typename T, typename acc_t>
void pack_transposed(acc_t* to, int64_t width, const T* from, int64_t rows, int64_t columns,
                     int64_t row_stride, int64_t column_stride, acc_t scale = 1) {
  with_vectors([&] {
    int64_t done_rows = 0, done_columns = 0;
#ifdef TW_SHUFFLES
    if constexpr (sizeof(acc_t) == sizeof(uint32_t)) {
      if (column_stride == 1) done_rows = rows / 4 * 4, done_columns = columns / 4 * 4;
      for (int64_t c = 0; c < done_columns; c += 4) {
        for (int64_t r = 0; r < done_rows; r += 4) {
          std::array<Words, 4> block;
          for (int64_t i = 0; i < 4; ++i) {
            typename CpuLanes<acc_t, sizeof(Words)>::Type row;
            load_lanes(row, from + (r + i) * row_stride + c);
            row *= scale;
            std::memcpy(&block[i], &row, sizeof(row));
          }
          transpose_block(block);
          for (int64_t i = 0; i < 4; ++i) {
            std::memcpy(to + (c + i) * width + r, &block[i], sizeof(block[i]));
          }
        }
      }
    }
#endif
    if constexpr (sizeof(acc_t) == sizeof(uint16_t)) {
      if (column_stride == 1) {
        done_rows = rows, done_columns = columns;
        transpose_halves(reinterpret_cast<uint16_t*>(to), width,
                         reinterpret_cast<const uint16_t*>(from), row_stride, columns, rows);
      }
    }
    for (int64_t c = 0; c < columns; ++c) {
      for (int64_t r = c < done_columns ? done_rows : 0; r < rows; ++r) {
        to[c * width + r] = scaled(from[r * row_stride + c * column_stride], scale);
      }
      for (int64_t r = rows; r < width; ++r) to[c * width + r] = 0;
    }
  });
}

// Copies `from` (rows, columns) times `scale` to `to` (height, columns). Rows of `to` from `rows`
// on become zero. The scale must be 1 if the dtype of `to` has 16 bits.
template <typename T, typename acc_t>
void pack_rows(acc_t* to, int64_t height, const T* from, int64_t rows, int64_t columns,
               int64_t row_stride, int64_t column_stride, acc_t scale = 1) {
  with_vectors([&] {
    for (int64_t r = 0; r < rows; ++r) {
      const T* row = from + r * row_stride;
      if (column_stride == 1) {
        for (int64_t c = 0; c < columns; ++c) {
          to[r * columns + c] = scaled(row[c], scale);
        }
      } else {
        for (int64_t c = 0; c < columns; ++c) {
          to[r * columns + c] = scaled(row[c * column_stride], scale);
        }
      }
    }
    for (int64_t i = rows * columns; i < height * columns; ++i) to[i] = 0;
  });
}

// Packs keys or values into tiles (batch, nheads_kv, tiles, 64, columns). If `transposed` is true,
// the tiles are (batch, nheads_kv, tiles, columns, 64). The tiles of a sequence hold its keys, from
// the first to the last key that any row sees. Keys in a gap become zeros: they may be NaN, and 0 *
// NaN would make the results of all rows in the block NaN.
template <typename T, typename acc_t>
Tensor pack_tiles(const CpuAttention& a, const Tensor& t, bool transposed) {
  const int64_t columns = t.size(3), tiles = a.tiles();
  const Tensor packed = at::empty({a.batch, a.nheads_kv, tiles, kTileKeys * columns},
                                  t.options().dtype(c10::CppTypeToScalarType<acc_t>::value));
  acc_t* to = packed.mutable_data_ptr<acc_t>();
  const CpuHeads<T> from(t);
  parallel_tasks(a.batch * a.nheads_kv * tiles, [&](int64_t task) {
    const int64_t tile = task % tiles, h = task / tiles % a.nheads_kv;
    const int64_t b = task / tiles / a.nheads_kv, key = a.seen[b].begin + tile * kTileKeys;
    const int64_t rows = std::min(kTileKeys, a.seen[b].end - key);
    if (rows <= 0) return;
    acc_t* tile_to = to + task * kTileKeys * columns;
    const auto pack = transposed ? pack_transposed<T, acc_t> : pack_rows<T, acc_t>;
    pack(tile_to, kTileKeys, from.row(b, h, key), rows, columns, from.row_stride,
         from.column_stride, 1);
    for (const KeyRange& gap : a.gaps[b]) {
      for (int64_t j = std::max(gap.begin, key); j < std::min(gap.end, key + rows); ++j) {
        acc_t* to_key = tile_to + (j - key) * (transposed ? 1 : columns);
        const int64_t step = transposed ? kTileKeys : 1;
        for (int64_t c = 0; c < columns; ++c) to_key[c * step] = 0;
      }
    }
  });
  return packed;
}

// Query rows [row, row + rows) of a sequence, and the range of key tiles that these rows see.
// begin, end, last_begin and first_end are key indices that count from first_key.
struct QueryBlock {
  static constexpr int64_t kMaxRows = 64;
  int64_t row, rows;
  int64_t first_key;  // the first key that any row of the sequence sees
  int64_t tile_begin, tile_end;
  int32_t begin[kMaxRows];  // row r sees the keys [begin[r], end[r]); both are 0 if it sees no key
  int32_t end[kMaxRows];
  int32_t last_end;               // the end of the keys that any row of the block sees
  int32_t last_begin, first_end;  // a row that sees a key sees all keys of [last_begin, first_end)

  QueryBlock(const CpuAttention& a, int64_t b, int64_t index)
      : row(index * a.block_rows()),
        rows(std::min(a.block_rows(), a.seqlen_q - row)),
        first_key(a.seen[b].begin),
        begin(),
        end(),
        last_end(0),
        last_begin(0),
        first_end(std::numeric_limits<int32_t>::max()) {
    const SequenceMask sequence = a.mask.sequence(b);
    int32_t first = first_end;
    for (int64_t r = 0; r < rows; ++r) {
      const KeyRange live = a.mask.row_keys(row + r, sequence);
      if (live.empty()) continue;
      begin[r] = static_cast<int32_t>(live.begin - first_key);
      end[r] = static_cast<int32_t>(live.end - first_key);
      first = std::min(first, begin[r]), last_end = std::max(last_end, end[r]);
      last_begin = std::max(last_begin, begin[r]), first_end = std::min(first_end, end[r]);
    }
    tile_begin = last_end > 0 ? first / kTileKeys : 0;
    tile_end = (last_end + kTileKeys - 1) / kTileKeys;
  }

  bool sees(int64_t r) const { return begin[r] < end[r]; }
  bool empty() const { return tile_begin == tile_end; }
  int64_t tiles() const { return tile_end - tile_begin; }
  // The number of keys that are computed in a tile: all of them, but in the last tile only those up
  // to the last key that a row sees, rounded up to a multiple of 16.
  int64_t keys_in(int64_t tile) const {
    return std::min(kTileKeys, divide_up(last_end - tile * kTileKeys, int64_t{16}) * 16);
  }

  // Sets the hidden elements of a score tile (64, width) to `value`. If a row sees no key, its
  // elements may stay unchanged.
  template <typename acc_t>
  void fill_hidden(acc_t* tile_scores, int64_t tile, int64_t width, acc_t value) const {
    const auto first = static_cast<int32_t>(tile * kTileKeys);
    if (first >= last_begin && first + kTileKeys <= first_end) return;
    with_vectors([&] {
      for (int32_t c = 0; c < keys_in(tile); ++c) {
        acc_t* const s = tile_scores + c * width;
        for (int64_t r = 0; r < width; ++r) {
          s[r] = (first + c >= begin[r]) & (first + c < end[r]) ? s[r] : value;
        }
      }
    });
  }
};

// Computes delta[r] = sum(dout * out) - dlse for the rows that see a key. dout is packed as (rows,
// columns). dlse may be null.
template <typename T, typename acc_t>
void row_deltas(acc_t* delta, const acc_t* dout, const CpuHeads<T>& out,
                const CpuHeads<acc_t>* dlse, int64_t b, int64_t h, const QueryBlock& block,
                int64_t columns) {
  with_vectors([&] {
    for (int64_t r = 0; r < block.rows; ++r) {
      if (!block.sees(r)) continue;
      const T* row_out = out.row(b, h, block.row + r);
      acc_t sum = 0;
      for (int64_t c = 0; c < columns; ++c) {
        sum += dout[r * columns + c] * static_cast<acc_t>(row_out[c * out.column_stride]);
      }
      delta[r] = dlse ? sum - *dlse->row(b, h, block.row + r) : sum;
    }
  });
}

// Whether lse of a row counts only the keys of this call. max and `sum` are the maximum of the
// row's scores and the sum of exp(s - max). In a ring of devices, lse also counts the keys of other
// calls.
// NOTE: if lse counts only these keys, p = exp(s - max) / sum and delta = sum(p * dp) are the
// accurate forms. lse is rounded at the size of the scores, and the two sides of dp - delta would
// be rounded differently.
template <typename acc_t>
bool is_own_lse(acc_t max, acc_t sum, acc_t lse) {
  const acc_t own = std::log(sum) + max, size = std::max<acc_t>(1, std::abs(own));
  return std::abs(own - lse) <= 4 * std::numeric_limits<acc_t>::epsilon() * size;
}

// dsink of a head is a sum over query rows. Returns the part of this sum for the rows of `block`.
// `deltas` must come from row_deltas.
template <typename acc_t>
acc_t sink_gradient(acc_t sink, const acc_t* deltas, const CpuHeads<acc_t>& lse,
                    const CpuHeads<acc_t>* dlse, int64_t b, int64_t h, const QueryBlock& block) {
  acc_t sum = 0;
  for (int64_t r = 0; r < block.rows; ++r) {
    const int64_t i = block.row + r;
    if (block.sees(r)) {
      sum -= std::exp(sink - *lse.row(b, h, i)) * deltas[r];
    } else if (dlse) {
      sum += *dlse->row(b, h, i);  // the lse of a row that sees no key is the sink
    }
  }
  return sum;
}

// Computes dsink (nheads,) = terms (batch, nheads) summed over the batch, if there is a sink.
inline void add_sink_terms(const Tensor& dsink, const Tensor& terms) {
  if (terms.defined()) dsink.copy_(terms.sum(0));
}

// The scratch memory of a task. Each call of allocate() returns the next `count` elements.
template <typename acc_t>
struct Scratch {
  Tensor tensor;
  acc_t* next;

  Scratch(int64_t count, const at::TensorOptions& options)
      : tensor(at::empty({count}, options)), next(tensor.mutable_data_ptr<acc_t>()) {}
  acc_t* allocate(int64_t count) { return std::exchange(next, next + count); }
};

}  // namespace torchweld
