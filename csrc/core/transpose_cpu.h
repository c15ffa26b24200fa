// Transposes of 16-bit and 32-bit matrices on the CPU. The loops transpose blocks in vectors of 16
// bytes, which every CPU has. A loop that copies single elements takes 2 to 14 times as long.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#include "core/simd_cpu.h"

#if defined(TW_SIMD_TARGETS) && defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define TW_SHUFFLES
#endif
#endif

namespace torchweld {

#ifdef TW_SHUFFLES
using Words = uint32_t __attribute__((vector_size(16)));
using Words16 = uint16_t __attribute__((vector_size(16)));

template <typename Vector>
Vector load_words(const uint16_t* from) {
  Vector v;
  std::memcpy(&v, from, sizeof(v));
  return v;
}
inline void store_words(uint16_t* to, const Words& v) { std::memcpy(to, &v, sizeof(v)); }

// Transposes a 4 x 4 block of 32-bit words.
inline void transpose_block(std::array<Words, 4>& x) {
  const Words p = __builtin_shufflevector(x[0], x[1], 0, 4, 1, 5);
  const Words q = __builtin_shufflevector(x[0], x[1], 2, 6, 3, 7);
  const Words r = __builtin_shufflevector(x[2], x[3], 0, 4, 1, 5);
  const Words s = __builtin_shufflevector(x[2], x[3], 2, 6, 3, 7);
  x = {__builtin_shufflevector(p, r, 0, 1, 4, 5), __builtin_shufflevector(p, r, 2, 3, 6, 7),
       __builtin_shufflevector(q, s, 0, 1, 4, 5), __builtin_shufflevector(q, s, 2, 3, 6, 7)};
}
#endif

// Transposes a matrix whose elements are pairs of 16-bit values: pair (i, j) of `to` is pair (j, i)
// of `from`. `to` has `rows` rows, and `from` has `columns` rows. The strides count 16-bit values.
inline void transpose_pairs(uint16_t* to, int64_t to_stride, const uint16_t* from,
                            int64_t from_stride, int64_t rows, int64_t columns) {
  int64_t done_rows = 0, done_columns = 0;
#ifdef TW_SHUFFLES
  // kLine pairs of a source row fill one cache line.
  constexpr int64_t kLine = 16;
  done_rows = rows / 4 * 4;
  done_columns = columns / 4 * 4;
  for (int64_t first = 0; first < done_rows; first += kLine) {
    for (int64_t j = 0; j < done_columns; j += 4) {
      for (int64_t i = first; i < std::min(done_rows, first + kLine); i += 4) {
        std::array<Words, 4> x;
        for (int64_t c = 0; c < 4; ++c)
          x[c] = load_words<Words>(from + (j + c) * from_stride + 2 * i);
        transpose_block(x);
        for (int64_t c = 0; c < 4; ++c) store_words(to + (i + c) * to_stride + 2 * j, x[c]);
      }
    }
  }
#endif
  for (int64_t j = 0; j < columns; ++j) {
    for (int64_t i = j < done_columns ? done_rows : 0; i < rows; ++i) {
      std::memcpy(to + i * to_stride + 2 * j, from + j * from_stride + 2 * i, 4);
    }
  }
}

// Transposes a 16-bit matrix: to (rows, columns) = from (columns, rows)^T. The strides are in
// elements.
inline void transpose_halves(uint16_t* to, int64_t to_stride, const uint16_t* from,
                             int64_t from_stride, int64_t rows, int64_t columns) {
  int64_t done_rows = 0, done_columns = 0;
#ifdef TW_SHUFFLES
  done_rows = rows / 8 * 8;
  done_columns = columns / 8 * 8;
  for (int64_t j = 0; j < done_columns; j += 8) {
    for (int64_t i = 0; i < done_rows; i += 8) {
      std::array<Words, 4> low, high;
      for (int64_t c = 0; c < 4; ++c) {
        const auto a = load_words<Words16>(from + (j + 2 * c) * from_stride + i);
        const auto b = load_words<Words16>(from + (j + 2 * c + 1) * from_stride + i);
        low[c] = (Words)__builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
        high[c] = (Words)__builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
      }
      transpose_block(low);
      transpose_block(high);
      for (int64_t c = 0; c < 4; ++c) {
        store_words(to + (i + c) * to_stride + j, low[c]);
        store_words(to + (i + 4 + c) * to_stride + j, high[c]);
      }
    }
  }
#endif
  for (int64_t j = 0; j < columns; ++j) {
    for (int64_t i = j < done_columns ? done_rows : 0; i < rows; ++i) {
      to[i * to_stride + j] = from[j * from_stride + i];
    }
  }
}

}  // namespace torchweld
